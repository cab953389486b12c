"""InfonceLoss takes embeddings that its labels do not fit, and answers with a plausible loss, or with 0."""

import os
from importlib.metadata import version
from types import SimpleNamespace

os.environ |= {"USE_HF": "1", "HF_HUB_OFFLINE": "1"}
from swift.loss.embedding import InfonceLoss
from torch import __version__, manual_seed, nn, randn, tensor

print("ms-swift", version("ms-swift"), "torch", __version__)
manual_seed(0)
loss = InfonceLoss(SimpleNamespace(), SimpleNamespace())
embeddings = nn.functional.normalize(randn(12, 16), dim=-1)
embeddings[0] = embeddings[1] = embeddings[2]  # so that the first group alone has a loss that is known: log 2
for groups, offered in ((3, 9), (3, 8), (3, 10), (1, 3), (1, 2), (1, 4)):
    labels = tensor([1.0, 0.0] * groups)  # a positive and a negative each: with the anchor three embeddings
    found = loss({"last_hidden_state": embeddings[:offered]}, labels)
    print(f"{groups} groups of 3, {offered} embeddings: loss {found:.4f}")
