"""Slots of -1, broken position ids and labels that do not fit: boundaries are guessed, not refused."""

from importlib.metadata import version

import torch
from axolotl.monkeypatch.models.gated_delta_net_ops import _cu_seqlens_from_position_ids
from axolotl.monkeypatch.models.mamba_utils import get_seq_idx
from twinkle.loss.infonce import InfonceLoss
from twinkle.processor.base import InputProcessor

print({name: version(name) for name in ("axolotl", "twinkle-kit", "torch")})
for positions in ([0, 1, 0, -1], [-1, 0, 1], [0, 1, 5]):
    row = torch.tensor(positions, dtype=torch.long)[None]
    found = {"axolotl, sequence index": get_seq_idx(row)[0].tolist()}
    found["axolotl, gated delta net"] = _cu_seqlens_from_position_ids(row).tolist()
    found["twinkle, packed parameters"] = InputProcessor._get_packed_seq_params(row).cu_seqlens_q.tolist()
    found["twinkle, last tokens"] = InputProcessor._packed_last_indices(row, len(positions)).tolist()
    print("position ids", positions, found)
rows, labels = torch.eye(3)[:2], torch.tensor([1.0, 0.0, 0.0])
loss = InfonceLoss()({"labels": labels}, {"embeddings": rows})["loss"]
print("twinkle, 3 labels for 2 embeddings: loss", float(loss))
