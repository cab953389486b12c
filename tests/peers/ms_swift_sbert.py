"""ms-swift's other branch: models of sentence-transformers, GTE-Qwen2 and EmbeddingGemma among them, padding-free."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from torch import Tensor
from transformers import PreTrainedModel

from oracle.models import HIDDEN
from tests.peers.models import directory, only
from tests.peers.ms_swift import VERSION, SwiftMixin, loaded, swift_loss

# A mean over too many rows has the right direction: normalised it differs by 1e-11, and would hide the others. The
# first rows are zeros, whose gradient when normalised no arithmetic holds.
POOLING = {"last": "lasttoken", "max": "max", "weighted_mean": "weightedmean"}


class OfSentenceTransformers:
    """Its collator's packed row through the patched modules: re-padded after the first, then pooled."""

    name = "ms-swift, SentenceTransformer, padding_free"
    __version__ = VERSION

    def __init__(self) -> None:
        loaded(True, "right")  # outside exact arithmetic, which has no use for its set-up
        self.inner = Transformer(directory())

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """What the patched model returns for what its collator makes."""
        only(model, "qwen3")
        if layout.tail > 1 or layout.each > 1 or pooling not in POOLING:
            raise NotImplementedError
        _, template = loaded(True, "right")
        order = layout.arranged(len(sequences))
        inputs = template.data_collator([{"input_ids": list(sequences[i]), "length": len(sequences[i])} for i in order])
        self.inner.model = model
        whole = SentenceTransformer(modules=[self.inner, Pooling(HIDDEN, POOLING[pooling]), Normalize()], device="cpu")
        args = SimpleNamespace(task_type="embedding", padding_free=True, padding_side="right")
        SwiftMixin._patch_tasks(SimpleNamespace(model=whole, template=template, task_type="embedding", args=args))
        before, model.config.use_cache = model.config.use_cache, False
        try:
            found: Tensor = whole(**inputs)["last_hidden_state"]
        finally:
            model.config.use_cache = before
        return found[torch.tensor(order).argsort()] if len(found) == len(order) else found

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """As of its other models."""
        return swift_loss(embeddings, labels, options)
