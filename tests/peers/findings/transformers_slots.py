"""A -1 among position ids joins the sequence after it."""

import torch
import transformers
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

print("transformers", transformers.__version__, "torch", torch.__version__)
# Two sequences, of 2 and 1 tokens, each with a slot of padding after it, as sequence parallelism makes them.
position_ids = torch.tensor([[0, 1, -1, 0, -1]])
print("position ids                        ", position_ids[0].tolist())
print("find_packed_sequence_indices        ", find_packed_sequence_indices(position_ids)[0].tolist())
(starts, _), _ = prepare_fa_kwargs_from_position_ids(position_ids)
print("prepare_fa_kwargs_from_position_ids ", starts.tolist())
