"""With a cache, packed position ids do not separate sequences."""

import torch
import transformers
from transformers import DataCollatorWithFlattening, Qwen3Config, Qwen3Model

torch.manual_seed(0)
print("transformers", transformers.__version__, "torch", torch.__version__)
shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
model = Qwen3Model(Qwen3Config(**shape, num_key_value_heads=2, vocab_size=64)).eval()
batch = DataCollatorWithFlattening()([{"input_ids": [5, 6]}, {"input_ids": [7]}], return_tensors="pt")
batch.pop("labels")
alone = {"input_ids": torch.tensor([[7]]), "position_ids": torch.tensor([[0]])}
print("the configuration's use_cache:", model.config.use_cache)
for use_cache in (False, True):
    with torch.no_grad():
        packed, single = (model(**each, use_cache=use_cache).last_hidden_state[0, -1] for each in (batch, alone))
    print(f"use_cache={use_cache}: the last sequence packed and alone differ by {(packed - single).abs().max():.1e}")
