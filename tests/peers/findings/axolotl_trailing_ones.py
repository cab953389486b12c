"""One-token sequences at the end of a packed row are taken for padding, and become one sequence."""

from importlib.metadata import version

import torch
from axolotl.monkeypatch.utils import get_cu_seqlens_from_pos_ids

print("axolotl", version("axolotl"), "torch", torch.__version__)
for lengths in ([2, 1], [2, 1, 1], [1, 1], [3, 2, 1, 1, 1]):
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens, _ = get_cu_seqlens_from_pos_ids(position_ids[None])
    found = cu_seqlens[0].diff().tolist()
    print(f"packed {lengths}: found {found}", "" if found == lengths else "WRONG")
