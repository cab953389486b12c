"""Packed position ids do not separate sequences in many encoders: the mask never hears of them."""

import torch
import transformers
from transformers import AutoConfig, AutoModel

torch.manual_seed(0)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SMALL |= {"num_key_value_heads": 2, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "embedding_size": 32}
KINDS = ["bert", "xlm-roberta", "electra", "qwen3", "modernbert", "eurobert", "gte", "nomic_bert", "jina_embeddings_v3"]
KINDS += ["albert", "distilbert", "mobilebert", "afmoe", "opt", "biogpt"]
print("transformers", transformers.__version__, "torch", torch.__version__)
for kind in KINDS:
    config = AutoConfig.for_model(kind)
    shape = {name: value for name, value in SMALL.items() if hasattr(config, name)}
    config = AutoConfig.for_model(kind, **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModel.from_config(config, attn_implementation="sdpa").eval()

    def last(ids, positions, model=model):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=False)
        return out.last_hidden_state[0, -1]

    alone, packed = last([7], [0]), last([5, 6, 7], [0, 1, 0])
    verdict = "holds" if torch.allclose(alone, packed, atol=1e-5) else "LEAKS"
    print(f"{kind:20} {verdict} {(alone - packed).abs().max():.1e}")
