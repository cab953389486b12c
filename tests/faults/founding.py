"""The founding fault: boundaries found where position ids decrease (ms-swift 3.10.1, issue 9903).

A sequence of one token beside another gives 0, 0: no decrease, so the two become one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import Packed, PaddingFree, encoder
from tests.faults.base import Sequences, finished, unit
from tests.faults.catalogue import planted


@planted("boundaries.lengths_are_recovered", "modelscope/ms-swift/issues/9903", smallest=[1, 1])
class StrictDecrease(PaddingFree):
    """Attention knows the sequences; the step that takes the stream apart again asks where position ids fall."""

    name = "strict-decrease"

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None:
            return super().boundaries(position_ids, **given)
        decreases = (position_ids[1:] < position_ids[:-1]).nonzero().flatten() + 1
        edges = [0, *decreases.tolist(), len(position_ids)]
        return [after - before for before, after in itertools.pairwise(edges)]

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        packed = self.pack(model, sequences, layout)
        return self._pooled(encoder.hidden_states(model, packed, self.backend), packed)

    def _pooled(self, states: Tensor, packed: Packed) -> Tensor:
        lengths = self.boundaries(packed.position_ids)
        vectors = states[torch.tensor(lengths).cumsum(0) - 1]
        if len(lengths) == len(packed.order):
            vectors = vectors[torch.tensor(packed.places)]
        return unit(vectors)

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """The release's loss: groups by the labels, and whatever rows there are."""
        starts = [i for i, label in enumerate(labels) if label != 0]
        sizes = [b - a + 1 for a, b in zip(starts, [*starts[1:], len(labels)], strict=True)]
        losses, row = [], 0
        for size in sizes:
            rows = embeddings[row : row + size]
            row += size
            if len(rows) > 1:
                losses.append(-torch.log_softmax(rows[1:] @ rows[0] / options.temperature, dim=0)[0])
        return torch.stack(losses).mean()

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        embeddings = self.encode(model, case.sequences, case.stream)
        return finished(model, embeddings, self.loss(embeddings, case.labels, case.options))
