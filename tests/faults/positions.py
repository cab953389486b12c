"""Right boundaries, wrong positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import Packed, encoder, packing, surface
from tests.faults.base import Encoding, Sequences, owners
from tests.faults.catalogue import planted

EMBEDDINGS = "agreement.embeddings_equal_the_padded_ones"


class _Positions(Encoding):
    """Faults of ``positions``, int64 [T] of a packed stream."""

    def positions(self, packed: Packed) -> Tensor:
        raise NotImplementedError

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        wrong = replace(packed, position_ids=self.positions(packed))
        return encoder.encode(model, wrong, pooling, self.backend)


@planted("isolation.number_does_not_matter", "hiyouga/LlamaFactory/pull/7318")
@planted(EMBEDDINGS, "hiyouga/LlamaFactory/pull/7318")
class PositionsNeverReset(_Positions):
    """Positions count on through the stream: rotary embedding hides it from any tolerance."""

    def positions(self, packed: Packed) -> Tensor:
        return torch.arange(len(packed.position_ids)) + packed.position_ids[0]


@planted(EMBEDDINGS, model="bert", smallest=[1, 1])
class PositionsNeverResetAbsolute(PositionsNeverReset):
    """The same with absolute positions, where a table of them is looked up."""


@planted(EMBEDDINGS, "huggingface/transformers/issues/47496", model="xlm-roberta", smallest=[1, 1])
class RobertaFromZero(_Positions):
    """Positions begin at 0 in every model, in RoBERTa too, where they begin after the pad's id."""

    def positions(self, packed: Packed) -> Tensor:
        return owners(packed.lengths)[1]


@planted("isolation.order_does_not_matter", model="bert", smallest=[1, 2])
class PositionsOfTheBatch(_Positions):
    """Texts are packed in another order, and their positions in the batch's own."""

    def positions(self, packed: Packed) -> Tensor:
        lengths = [packed.lengths[place] for place in packed.places]
        return owners(lengths)[1]


@planted("isolation.what_stands_in_slots_does_not_matter", model="bert", smallest=[1, 1])
class SlotsCountAsPositions(Encoding):
    """Positions count the slots that stand before a sequence in the stream."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        packed = self.pack(model, sequences, layout)
        gaps = torch.tensor([-length % layout.each for length in packed.lengths])
        before = (gaps.cumsum(0) - gaps)[owners(packed.lengths)[0]]
        return self.embed(model, replace(packed, position_ids=packed.position_ids + before), pooling)


@planted(EMBEDDINGS, model="bert", smallest=[1, 1])
class AllButTheFirstBeginAtOne(_Positions):
    """A sequence's first position is its predecessor's last one's end: 0 for the first, 1 for all others."""

    def positions(self, packed: Packed) -> Tensor:
        owner, at = owners(packed.lengths)
        return at + (owner > 0)


@planted(EMBEDDINGS, model="bert", smallest=[1, 2])
class PositionsBackwards(_Positions):
    """Positions are counted from the end, as a left-padded cache would."""

    def positions(self, packed: Packed) -> Tensor:
        owner, at = owners(packed.lengths)
        return torch.tensor(packed.lengths)[owner] - 1 - at


@planted("agreement.positions_beyond_256_equal_the_padded_ones", "huggingface/candle/pull/3520")
class PositionsInBfloat16(_Positions):
    """Positions pass through bfloat16, which holds every number up to 256 and then every second one."""

    def positions(self, packed: Packed) -> Tensor:
        at = packed.position_ids
        return torch.where(at > 256, at // 2 * 2, at)


@planted("isolation.what_stands_in_slots_does_not_matter", "hiyouga/LlamaFactory/pull/10783", smallest=[1, 1])
class PositionsNotPadded(Encoding):
    """Ids are filled up to a multiple, and position ids are not."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        right = packing.from_stream

        def unfilled(ids: Tensor, positions: Tensor, lengths: Any = None, first: int = 0) -> Packed:
            return right(ids, positions[positions >= 0], lengths, first)

        with mock.patch.object(surface.packing, "from_stream", unfilled):
            return super().encode(model, sequences, layout, pooling)
