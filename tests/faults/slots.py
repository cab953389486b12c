"""What stands in slots reaches a sequence, or a sequence is looked for among slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree, encoder, packing
from tests.faults.base import Encoding, Sequences, finished
from tests.faults.catalogue import planted


@planted("slots.lengths_find_their_tokens_in_any_layout", "modelscope/ms-swift/pull/10184", smallest=[1, 1])
class UnpaddedSlices(PaddingFree):
    """Output with slots is cut where the sequences would stand without them."""

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        assert lengths is not None
        return list(values[: sum(lengths)].split(list(lengths)))


@planted("slots.lengths_find_their_tokens_in_any_layout", "OpenRLHF/OpenRLHF/pull/781")
class RangesFromRanges(PaddingFree):
    """A sequence's place is counted from the last one's tokens, not from the last one's slots' end."""

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        assert lengths is not None
        real = packing.real_tokens(position_ids, lengths)
        pieces, start = [], 0
        for i, length in enumerate(lengths):
            first = int(real[start]) if i < 2 else int(real[start - lengths[i - 1]]) + lengths[i - 1]
            pieces.append(values[first : first + length])
            start += length
        return pieces


@planted("slots.what_stands_in_slots_stays_there", "pytorch/pytorch/issues/101967", smallest=[1, 1])
class SlotsMultipliedAway(PaddingFree):
    """Tokens are picked by a product with a matrix of ones and zeros: zero times NaN is NaN."""

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        assert lengths is not None
        real = packing.real_tokens(position_ids, lengths)
        chosen = torch.nn.functional.one_hot(real, len(values)).to(values.dtype)
        return list((chosen @ values).split(list(lengths)))


class _Recycled(torch.autograd.Function):
    """Rows by index, whose backward leaves in all other rows what was in memory."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = values.shape
        return values[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        memory = gradients[0].new_full(ctx.shape, 7.0)
        memory[rows] = gradients[0]
        return memory, None


@planted("slots.what_stands_in_slots_stays_there", "pytorch/pytorch/pull/188933", smallest=[1, 1])
class SlackRowsNotWritten(PaddingFree):
    """The backward pass writes the gradients of real tokens, and leaves slots as the memory was."""

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        assert lengths is not None
        taken: Tensor = _Recycled.apply(values, packing.real_tokens(position_ids, lengths))
        return list(taken.split(list(lengths)))


@planted("slots.nan_in_slots_spoils_no_gradient", "fla-org/flash-linear-attention/pull/892", smallest=[1, 1, 1])
class SlotsThroughTheModel(PaddingFree):
    """Each slot runs through the model as a sequence of its own, and is dropped only then: its zero gradient times
    its NaN enters every weight's.
    """

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        order = case.stream.arranged(len(case.sequences))
        stream: list[Sequence[int]] = []
        kept = [0] * len(order)
        for i in order:
            kept[i] = len(stream)
            stream.append(case.sequences[i])
            stream += [(case.stream.slot or 0,)] * (-len(case.sequences[i]) % case.stream.each)
        embeddings = encoder.encode(model, packing.pack(stream, "given"))[torch.tensor(kept)]
        return finished(model, embeddings, self.loss(embeddings, case.labels, case.options))


@planted("isolation.what_stands_in_slots_does_not_matter", smallest=[1, 1])
class SlotsPooled(Encoding):
    """The last token of a sequence is looked for at the end of its padded segment."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        padded = [[*ids, *[0] * (-len(ids) % layout.each)] for ids in sequences]
        return self.embed(model, self.pack(model, padded, replace(layout, each=1, tail=1)), pooling)


@planted("isolation.what_stands_in_slots_does_not_matter", smallest=[1, 2])
class TailJoinsTheLast(Encoding):
    """Slots at the tail are one more stretch of the last sequence in the stream."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        order = layout.arranged(len(sequences))
        missing = -sum(map(len, sequences)) % layout.tail
        longer = [[*ids, *[3] * missing] if i == order[-1] else ids for i, ids in enumerate(sequences)]
        return self.embed(model, self.pack(model, longer, replace(layout, tail=1)), pooling)
