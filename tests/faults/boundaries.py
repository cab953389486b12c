"""Boundaries found at the wrong places, or guessed where nobody can know them."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from impl import PaddingFree
from tests.faults.catalogue import planted


def _between(edges: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(edges)]


class _FromPositions(PaddingFree):
    """Faults of ``recover``, which is given one row of position ids; other forms are right."""

    def recover(self, positions: Tensor) -> list[int]:
        raise NotImplementedError

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None or position_ids.dim() > 1:
            return super().boundaries(position_ids, **given)
        return self.recover(position_ids)


class _FromRows(PaddingFree):
    """Faults of ``recover``, which is given mRoPE's rows of position ids [3 or 4, T]; other forms are right."""

    def recover(self, rows: Tensor) -> list[int]:
        raise NotImplementedError

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None or position_ids.dim() == 1:
            return super().boundaries(position_ids, **given)
        return self.recover(position_ids)


@planted("boundaries.slots_at_the_tail_change_nothing", smallest=[1, 2])
class TailSlotsCounted(_FromPositions):
    """Slots at the tail are counted into the last sequence."""

    def recover(self, positions: Tensor) -> list[int]:
        lengths = super(_FromPositions, self).boundaries(positions)
        lengths[-1] += len(positions) - int((positions >= 0).nonzero()[-1]) - 1
        return lengths


@planted("boundaries.slots_after_each_sequence_change_nothing", "NVIDIA/Megatron-LM/pull/5541", smallest=[1, 1])
class PaddedSegments(_FromPositions):
    """A sequence's length is the distance between two beginnings, slots and all."""

    def recover(self, positions: Tensor) -> list[int]:
        return _between([*(positions == 0).nonzero().flatten().tolist(), len(positions)])


@planted("boundaries.slots_at_the_tail_change_nothing", "modelscope/ms-swift/pull/9924")
@planted("boundaries.slots_after_each_sequence_change_nothing", "modelscope/ms-swift/pull/9924")
class PaddedIdsCompared(_FromPositions):
    """Boundaries where position ids do not rise, slots of -1 among them: the repaired comparison, unfiltered."""

    def recover(self, positions: Tensor) -> list[int]:
        falls = (positions[1:] <= positions[:-1]).nonzero().flatten() + 1
        return _between([0, *falls.tolist(), len(positions)])


@planted("boundaries.cu_seqlens_give_the_lengths", smallest=[1, 1])
class LastCuSeqlenDropped(PaddingFree):
    """The last cumulative length is taken for the stream's, not for a boundary."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if given.get("cu_seqlens") is not None:
            given["cu_seqlens"] = given["cu_seqlens"][:-1]
        return super().boundaries(position_ids, **given)


@planted("boundaries.cu_seqlens_give_the_lengths", smallest=[1, 1])
class CuSeqlensWithoutZero(PaddingFree):
    """Cumulative lengths are taken for ends alone: a 0 is put before the 0 that is there."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if given.get("cu_seqlens") is None:
            return super().boundaries(position_ids, **given)
        return _between([0, *given["cu_seqlens"].tolist()])


@planted("boundaries.what_cannot_be_split_is_refused", "hiyouga/LlamaFactory/issues/10452", smallest=[1, 1])
class ZerosBegin(_FromPositions):
    """A sequence begins at every 0, and nothing else is looked at."""

    def recover(self, positions: Tensor) -> list[int]:
        real = positions[positions >= 0]
        return _between([*(real == 0).nonzero().flatten().tolist(), len(real)])


@planted("boundaries.malformed_cu_seqlens_are_refused", "NVIDIA-NeMo/Megatron-Bridge/pull/4489", smallest=[1, 1])
class PlainDifferences(PaddingFree):
    """Lengths are the differences of cu_seqlens, sentinels and whatever else they hold among them."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if given.get("cu_seqlens") is None:
            return super().boundaries(position_ids, **given)
        return [int(n) for n in given["cu_seqlens"].diff()]


@planted("slots.pads_numbered_like_a_sequence_are_refused", smallest=[1, 2])
class CountIgnored(PaddingFree):
    """The number of sequences is known, and not looked at."""

    def boundaries(self, position_ids: Tensor | None = None, *, count: int | None = None, **given: Any) -> list[int]:
        return super().boundaries(position_ids, **given)


@planted("boundaries.lengths_are_recovered")
class ThreeOnesMerge(_FromPositions):
    """A step of 0 to 0 begins a sequence, unless another one follows."""

    def recover(self, positions: Tensor) -> list[int]:
        lengths = super(_FromPositions, self).boundaries(positions)
        merged: list[int] = []
        for at, length in enumerate(lengths):
            if length == 1 and lengths[max(0, at - 2) : at] == [1, 1] and merged:
                merged[-1] += 1
            else:
                merged.append(length)
        return merged


@planted("boundaries.lengths_are_recovered", "huggingface/transformers/pull/47342", smallest=[1, 1])
class BatchAxisAssumed(_FromPositions):
    """Position ids are read as [batch, T]: one row of them without a batch has no second axis."""

    def recover(self, positions: Tensor) -> list[int]:
        starts = [at for at in range(positions.shape[1]) if positions[0, at] == 0]
        return _between([*starts, positions.shape[1]])


@planted("boundaries.slots_at_the_tail_change_nothing", "huggingface/transformers/pull/47525", smallest=[1, 2])
class MinimumBegins(_FromPositions):
    """A sequence begins wherever the least position stands, whether that is a first one or a slot's -1."""

    def recover(self, positions: Tensor) -> list[int]:
        starts = (positions == positions.min()).nonzero().flatten().tolist()
        return _between([*starts, len(positions)])


@planted("boundaries.slots_after_each_sequence_change_nothing", smallest=[1, 1])
class StopsAtTheFirstSlot(_FromPositions):
    """Slots are thought to stand at the tail alone: the stream ends where the first one is."""

    def recover(self, positions: Tensor) -> list[int]:
        slots = (positions < 0).nonzero().flatten().tolist()
        return super(_FromPositions, self).boundaries(positions[: slots[0]] if slots else positions)


@planted("boundaries.lengths_are_recovered")
class FullStreamLosesItsLast(_FromPositions):
    """A stream that fills a multiple of eight is taken for one whose last sequence was cut off."""

    def recover(self, positions: Tensor) -> list[int]:
        lengths = super(_FromPositions, self).boundaries(positions)
        return lengths if len(positions) % 8 else lengths[:-1]


@planted("boundaries.lengths_are_recovered", smallest=[1, 1])
class NeighboursShareALastToken(_FromPositions):
    """Boundaries are shifted by one: the first sequence keeps its successor's first token."""

    def recover(self, positions: Tensor) -> list[int]:
        lengths = super(_FromPositions, self).boundaries(positions)
        if len(lengths) > 1:
            lengths[0], lengths[1] = lengths[0] + 1, lengths[1] - 1
        return lengths


@planted("multimodal.mrope_rows_give_the_lengths", "huggingface/transformers/pull/40490", smallest=[1, 2])
class TemporalRow(_FromRows):
    """The first of mRoPE's rows is taken for the text's positions."""

    def recover(self, rows: Tensor) -> list[int]:
        row = rows[-3]
        real = row[row >= 0]
        return _between([*(real == 0).nonzero().flatten().tolist(), len(real)])


@planted("multimodal.mrope_rows_give_the_lengths", "QwenLM/Qwen3.8/issues/104", smallest=[1, 2])
class RowsAreABatch(_FromRows):
    """Three rows of mRoPE are read as a batch of three texts, one after another."""

    def recover(self, rows: Tensor) -> list[int]:
        flat = rows.flatten()
        return _between([*(flat == 0).nonzero().flatten().tolist(), len(flat)])


@planted("multimodal.mrope_rows_give_the_lengths", "verl-project/verl/pull/7137", smallest=[1, 2])
class RowLengthsAddUp(_FromRows):
    """Each of mRoPE's rows counts as one sequence: cumulative lengths 0, T, 2 T, 3 T."""

    def recover(self, rows: Tensor) -> list[int]:
        return [rows.shape[1]] * len(rows)


@planted("multimodal.mrope_rows_of_no_sequence_are_refused", smallest=[1, 2])
class OriginBegins(_FromRows):
    """A sequence begins wherever all rows are 0, and nothing else is looked at."""

    def recover(self, rows: Tensor) -> list[int]:
        real = rows[:, rows[0] >= 0]
        return _between([*(real == 0).all(0).nonzero().flatten().tolist(), real.shape[1]])
