"""revert_padding_free takes streams that it cannot split, and hands back rows of the wrong tokens."""

import os
from importlib.metadata import version

os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1"}
import torch
from swift.model.patcher import revert_padding_free

print("ms-swift", version("ms-swift"), "torch", torch.__version__)


def rows(count, **inputs):
    """The tokens, numbered from 1, that each sequence is given; 0 is padding."""
    states = torch.arange(1.0, count + 1)[None, :, None]
    found = revert_padding_free({"last_hidden_state": states}, inputs, "right")["last_hidden_state"]
    return found.squeeze(-1).int().tolist()


for positions in ([0, 1, 0], [0, 1, -1, 0], [-1, 0, 0], [5, 6, 0]):
    print(f"position ids {positions!s:14} ->", rows(len(positions), position_ids=torch.tensor([positions])))
for starts in ([0, 2, 3], [1, 2, 3], [0, 2, 2, 3], [0, 2]):
    print(f"cu_seqlens   {starts!s:14} ->", rows(3, cu_seq_lens_q=torch.tensor(starts)))
