"""Packed states are re-padded on the left without a mask, and pooled as if the padding were tokens."""

import os
from importlib.metadata import version

os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1"}
import torch
from sentence_transformers.models import Pooling
from swift.model.patcher import revert_padding_free

print({name: version(name) for name in ("ms-swift", "sentence-transformers", "torch")})
states = torch.tensor([[[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]])  # two sequences, of 1 token and of 2
inputs = {"position_ids": torch.tensor([[0, 0, 1]])}
for mode in ("lasttoken", "mean", "cls", "max", "weightedmean"):
    packed = revert_padding_free({"token_embeddings": states.clone()}, inputs, "left")
    found = Pooling(2, mode)(packed)["sentence_embedding"][0].tolist()
    alone = Pooling(2, mode)({"token_embeddings": states[:, :1]})["sentence_embedding"][0].tolist()
    print(f"{mode:13} the first sequence packed {found}, alone {alone}", "" if found == alone else "DIFFERS")
