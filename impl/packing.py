"""Packing: many sequences as one stream, boundaries kept from the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, zip_longest

import torch
from torch import Tensor

from impl.errors import BoundaryError, PackingError

SLOT = -1


@dataclass(frozen=True)
class Packed:
    """A packed batch without slots.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], counting from the model's first position in every sequence; [3, T] for
            mRoPE (temporal, height, width), [4, T] with the text's positions before those.
        cu_seqlens: int32 [n + 1], where each sequence begins in the stream, and T.
        lengths: token counts in stream order, as Python integers.
        order: lengths' indices in the caller's batch: stream place -> sequence.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def max_seqlen(self) -> int:
        """The longest sequence's length, without asking a device."""
        return max(self.lengths)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring sequences of equal length as (length, count)."""
        return [(length, len(list(run))) for length, run in groupby(self.lengths)]

    @property
    def places(self) -> list[int]:
        """Sequence -> stream place: the inverse of ``order``."""
        inverse = [0] * len(self.order)
        for place, sequence in enumerate(self.order):
            inverse[sequence] = place
        return inverse

    def last_tokens(self) -> Tensor:
        """int64 [n]: index of each sequence's last token in the stream, in the caller's order."""
        ends = self.cu_seqlens[1:].long() - 1
        return ends[torch.tensor(self.places, device=ends.device)]

    def pieces(self, tokens: int) -> Iterator[Packed]:
        """The stream cut between sequences, at most ``tokens`` a piece; a longer sequence is a piece by itself."""
        first = last = begin = end = 0  # sequences, tokens
        for length in self.lengths:
            if last > first and end + length - begin > tokens:
                yield self._piece(first, last, begin, end)
                first, begin = last, end
            last, end = last + 1, end + length
        yield self._piece(first, last, begin, end)

    def _piece(self, first: int, last: int, begin: int, end: int) -> Packed:
        ids, positions = self.input_ids[begin:end], self.position_ids[..., begin:end]
        ends = self.cu_seqlens[first : last + 1] - begin
        return Packed(ids, positions, ends, self.lengths[first:last], tuple(range(last - first)))

    def to(self, device: torch.device | str) -> Packed:
        """The same batch with its tensors on ``device``."""
        moved = (self.input_ids.to(device), self.position_ids.to(device), self.cu_seqlens.to(device))
        return replace(self, input_ids=moved[0], position_ids=moved[1], cu_seqlens=moved[2])

    def unpack(self, values: Tensor) -> list[Tensor]:
        """Per-token values [T, ...] as one [length, ...] for each sequence, in the caller's order."""
        if len(values) != len(self.input_ids):
            raise PackingError(f"{len(values)} values for a stream of {len(self.input_ids)} tokens")
        pieces = values.split(list(self.lengths))
        return [pieces[place] for place in self.places]


def pack(
    sequences: Sequence[Sequence[int]],
    order: Sequence[int] | str = "length",
    first_position: int = 0,
    vocabulary: int | None = None,
) -> Packed:
    """Packs token-id sequences into one stream.

    Args:
        sequences: non-empty, of token ids.
        order: "length" (ascending, so that equal lengths are neighbours: what the sdpa back end is fast
            on), "given", or a permutation of the indices.
        first_position: position id of a first token (2 for XLM-RoBERTa).
        vocabulary: if given, ids must lie below it.

    Raises:
        PackingError: names the sequence.
    """
    _check(sequences, vocabulary)
    chosen = _arrange(sequences, order)
    lengths = tuple(len(sequences[i]) for i in chosen)
    ids = [token for i in chosen for token in sequences[i]]
    positions = [p for length in lengths for p in range(first_position, first_position + length)]
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    return Packed(torch.tensor(ids), torch.tensor(positions), ends, lengths, chosen)


def _check(sequences: Sequence[Sequence[int]], vocabulary: int | None) -> None:
    if len(sequences) == 0:
        raise PackingError("the batch is empty: there is nothing to pack")
    for i, ids in enumerate(sequences):
        if len(ids) == 0:
            raise PackingError(f"sequence {i} is empty; an empty sequence has no embedding")
        if vocabulary is not None:
            for at, token in enumerate(ids):
                if not 0 <= token < vocabulary:
                    raise PackingError(f"sequence {i} holds the id {token} at {at}; the vocabulary has {vocabulary}")


def _arrange(sequences: Sequence[Sequence[int]], order: Sequence[int] | str) -> tuple[int, ...]:
    indices = range(len(sequences))
    if order == "given":
        return tuple(indices)
    if order == "length":
        return tuple(sorted(indices, key=lambda i: len(sequences[i])))
    if isinstance(order, str) or sorted(order) != list(indices):
        raise PackingError(f"order must be 'length', 'given' or a permutation of {len(sequences)} indices, not {order}")
    return tuple(order)


def from_stream(
    input_ids: Tensor,
    position_ids: Tensor,
    lengths: Sequence[int] | None = None,
    first_position: int = 0,
    count: int | None = None,
) -> Packed:
    """A batch that somebody else packed, with or without slots, slots removed.

    Give ``lengths`` where they are known: then pads after the last sequence may be numbered like one (0, 1,
    2, ... or all 0), which no one could tell from it otherwise. Without them the boundaries are recovered
    by ``boundaries``, or refused.

    Args:
        input_ids: int64 [T].
        position_ids: int64 [T], or [3, T] or [4, T] for mRoPE.
        lengths: real tokens of each sequence, in stream order.
        count: the number of sequences, if that alone is known.

    Raises:
        BoundaryError: names the slot, or the sequence.
    """
    if input_ids.dim() != 1 or position_ids.shape[-1:] != input_ids.shape:
        shapes = f"{tuple(input_ids.shape)} and {tuple(position_ids.shape)}"
        raise BoundaryError(f"input_ids [T] and position_ids [T] or [rows, T] must be of one length, found {shapes}")
    lengths, real = _located(position_ids, lengths, first_position, count)
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(input_ids.device)
    order = tuple(range(len(lengths)))
    return Packed(input_ids[real], position_ids[..., real], ends, tuple(lengths), order)


def real_tokens(position_ids: Tensor, lengths: Sequence[int], first_position: int = 0) -> Tensor:
    """int64 [sum of lengths]: where the sequences' tokens stand in a stream that may hold slots.

    Slots are -1, anywhere after the first sequence's beginning; what follows the last sequence is a pad,
    whatever its number.

    Args:
        position_ids: int64 [T], or [3, T] or [4, T] for mRoPE.
        lengths: real tokens of each sequence, in stream order.

    Raises:
        BoundaryError: the positions contradict the lengths; names the sequence and the slot.
    """
    if len(lengths) == 0:
        raise BoundaryError("lengths is empty: there is no sequence")
    rows = _rows(position_ids)
    if rows and _is_slot(rows[0]):
        raise BoundaryError("slot 0 is -1 before any sequence: slots may only follow one")
    places = [at for at, row in enumerate(rows) if not _is_slot(row)]
    total = 0
    for i, length in enumerate(lengths):
        if length < 1:
            raise BoundaryError(f"lengths says sequence {i} has {length} tokens; an empty sequence has no embedding")
        total += length
    if len(places) < total:
        raise BoundaryError(f"lengths sum to {total}, the stream holds {len(places)} tokens that are not slots")
    taken = 0
    for i, length in enumerate(lengths):
        own = places[taken : taken + length]
        if own[-1] - own[0] + 1 != length:
            raise BoundaryError(f"lengths says sequence {i} has {length} tokens from slot {own[0]}: slots stand inside")
        found = _lengths([rows[at] for at in own], first_position, own[0])
        if len(found) != 1:
            raise BoundaryError(
                f"lengths says sequence {i} has {length} tokens from slot {own[0]}, "
                f"but another sequence begins at slot {own[0] + found[0]}"
            )
        taken += length
    return torch.tensor(places[:total], device=position_ids.device)


def unpack(
    values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None, first_position: int = 0
) -> list[Tensor]:
    """Per-token values [T, ...] of a stream with slots: one [length, ...] for each sequence, in stream order.

    Slots are left out by index, never by multiplication: NaN in a slot, or in a slot's gradient, stays there.

    Args:
        position_ids, lengths: as in ``from_stream``.
    """
    if len(values) != position_ids.shape[-1]:
        raise BoundaryError(f"{len(values)} values for a stream of {position_ids.shape[-1]} slots and tokens")
    lengths, real = _located(position_ids, lengths, first_position)
    return list(values.index_select(0, real).split(list(lengths)))


def boundaries(
    position_ids: Tensor | Sequence[int] | None = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    total: int | None = None,
    first_position: int = 0,
    count: int | None = None,
) -> list[int]:
    """The sequences' lengths, from position ids or from cu_seqlens: exactly, or not at all.

    What position ids alone can show, and what not:

    ====================================================  =====================================
    one row: ``first_position``, +1, +1, ...              recovered: a sequence begins at every
                                                          ``first_position`` (0, 0 is two of one token)
    slots of -1 at the tail, after each sequence, both    recovered
    three rows of mRoPE                                   recovered: a sequence begins where all are 0. (One
                                                          that begins with a video whose second frame is
                                                          at time 0 too needs ``count`` or ``lengths``.)
    four rows, the text's positions first                 recovered from the first row
    slots of -1 before or inside a sequence               refused
    a sequence that begins elsewhere, skips or repeats    refused
    pads numbered 0, 1, 2, ... or all 0                   read like sequences; refused with ``count``,
                                                          right with ``lengths``
    an empty sequence, one that counts on from the last   invisible; refused with ``count`` or ``lengths``
    ====================================================  =====================================

    Args:
        position_ids: [T] integers, or [3, T] (temporal, height, width), or [4, T] (text, then those).
        cu_seqlens: [n + 1] integers instead: from 0, rising, to ``total`` where that is given.
        lengths: the lengths, if known: they are checked against the position ids.
        count: the number of sequences, if known.

    Raises:
        BoundaryError: names the slot, or the sequence.
    """
    if (position_ids is None) == (cu_seqlens is None):
        raise BoundaryError("give either position_ids or cu_seqlens")
    if cu_seqlens is not None:
        found = _from_cu_seqlens(_integers(cu_seqlens, "cu_seqlens"), total)
        if lengths is not None and list(lengths) != found:
            raise BoundaryError(f"cu_seqlens gives lengths {found}, told were {list(lengths)}")
    elif lengths is not None:
        real_tokens(torch.as_tensor(position_ids), lengths, first_position)
        found = list(lengths)
    else:
        assert position_ids is not None
        found = _lengths(_rows(position_ids), first_position)
    if cu_seqlens is None and total is not None and torch.as_tensor(position_ids).shape[-1] != total:
        raise BoundaryError(f"{torch.as_tensor(position_ids).shape[-1]} position ids, told were {total}")
    _check_count(found, count)
    return found


def _located(
    position_ids: Tensor, lengths: Sequence[int] | None, first_position: int, count: int | None = None
) -> tuple[list[int], Tensor]:
    """The lengths, recovered where they are not known, and where the tokens stand."""
    found = boundaries(position_ids, first_position=first_position) if lengths is None else list(lengths)
    _check_count(found, count)
    return found, real_tokens(position_ids, found, first_position)


def _check_count(lengths: list[int], count: int | None) -> None:
    if count is not None and len(lengths) != count:
        raise BoundaryError(
            f"{len(lengths)} sequences found where {count} were packed: "
            + ("one is empty or counts on from its neighbour" if len(lengths) < count else "pads are numbered like one")
        )


def _rows(position_ids: Tensor | Sequence[int]) -> list[tuple[int, ...]]:
    """Position ids token by token: one, three or four numbers each."""
    if not isinstance(position_ids, Tensor):
        return [(position,) for position in _integers(position_ids, "position_ids")]
    if position_ids.dim() == 2 and position_ids.shape[0] in (3, 4) and not position_ids.is_floating_point():
        return [tuple(column) for column in position_ids.T.tolist()]
    return [(position,) for position in _integers(position_ids, "position_ids")]


def _integers(values: Tensor | Sequence[int], name: str) -> list[int]:
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point():
            raise BoundaryError(f"{name} must be a vector of integers, found {values.dtype} {tuple(values.shape)}")
        return [int(v) for v in values.tolist()]
    wrong = next((v for v in values if not isinstance(v, int)), None)
    if wrong is not None:
        raise BoundaryError(f"{name} must be a vector of integers, found {wrong!r} in it")
    return list(values)


def _from_cu_seqlens(ends: list[int], total: int | None) -> list[int]:
    if len(ends) < 2:
        raise BoundaryError(f"cu_seqlens needs at least two entries, found {ends}")
    if ends[0] != 0:
        raise BoundaryError(f"cu_seqlens must start at 0, found {ends[0]}")
    lengths = [after - before for before, after in pairwise(ends)]
    for i, length in enumerate(lengths):
        if length < 0:
            raise BoundaryError(f"cu_seqlens decreases at sequence {i}: {ends[i]}, then {ends[i + 1]}")
        if length == 0:
            raise BoundaryError(f"cu_seqlens says sequence {i} is empty; an empty sequence has no embedding")
    if total is not None and ends[-1] != total:
        raise BoundaryError(f"cu_seqlens ends at {ends[-1]}, the stream at {total}")
    return lengths


def _is_slot(row: tuple[int, ...]) -> bool:
    return row == (SLOT,) * len(row)


def _lengths(rows: list[tuple[int, ...]], first: int, offset: int = 0) -> list[int]:
    """Lengths of the sequences in ``rows``, whose first one stands at slot ``offset``."""
    if not rows:
        raise BoundaryError("position_ids is empty: there is no sequence")
    if len(rows[0]) == 1:
        return _from_text([row[0] for row in rows], first, offset)
    if len(rows[0]) == 3:
        return _from_mrope(rows, offset)
    for at, row in enumerate(rows, offset):
        if (row[0] == SLOT) != _is_slot(row[1:]):
            raise BoundaryError(f"slot {at} holds position {row}: -1 in some rows and not in others")
    found = _from_text([row[0] for row in rows], first, offset)
    axes = _from_mrope([row[1:] for row in rows], offset)
    if found != axes:
        wrong = next(i for i, (a, b) in enumerate(zip_longest(found, axes)) if a != b)
        raise BoundaryError(f"the text's row and the three axes disagree from sequence {wrong} on")
    return found


def _from_text(positions: list[int], first: int, offset: int) -> list[int]:
    lengths: list[int] = []
    before = None
    for at, position in enumerate(positions, offset):
        if position == first:
            lengths.append(1)
        elif position == SLOT:
            if before is None:
                raise BoundaryError(f"slot {at} is -1 before any sequence: slots may only follow one")
        elif before is None:
            raise BoundaryError(f"slot {at} holds position {position}; a sequence begins at {first}")
        elif before == SLOT:
            raise BoundaryError(f"slot {at} holds position {position} after slots of -1; a sequence begins at {first}")
        elif position == before + 1:
            lengths[-1] += 1
        else:
            raise BoundaryError(
                f"slot {at} holds position {position} after {before}: neither its successor nor a beginning"
            )
        before = position
    return lengths


def _from_mrope(rows: list[tuple[int, ...]], offset: int) -> list[int]:
    """A sequence is made of text (three equal numbers, rising by one) and of image or video grids."""
    lengths: list[int] = []
    expected: tuple[int, ...] = ()  # where the sequence may go on
    at = 0
    while at < len(rows):
        row = rows[at]
        if _is_slot(row):
            if not lengths:
                raise BoundaryError(f"slot {at + offset} is -1 before any sequence: slots may only follow one")
            expected, at = (), at + 1
            continue
        base = row[0]
        if row == (0, 0, 0):
            lengths.append(0)
        elif row != (base, base, base) or base not in expected:
            where = f"{' or '.join(map(str, expected))} on all axes" if expected else "0 on all axes"
            raise BoundaryError(f"slot {at + offset} holds position {row}; expected {where}, or a new sequence's 0")
        size, expected = _grid(rows, at)
        lengths[-1] += size
        at += size
    return lengths


def _grid(rows: list[tuple[int, ...]], at: int) -> tuple[int, tuple[int, ...]]:
    """The largest grid (frames, height, width in raster order) that begins at ``at``: its size, and where
    text may go on after it. A single text token is a grid of one.

    A video's frames may be any time apart, two at the same time too. Qwen2-VL goes on after the greatest
    position, transformers 5 after the longer side.
    """
    t, h, w = rows[at]
    width = 1
    while at + width < len(rows) and rows[at + width] == (t, h, w + width):
        width += 1
    height = 1
    while rows[at + height * width : at + (height + 1) * width] == [(t, h + height, w + i) for i in range(width)]:
        height += 1
    area, last = height * width, t
    frame = [row[1:] for row in rows[at : at + area]]
    least = 0 if area > 1 and t > 0 else 1  # at 0 a frame at the same time would look like a sequence
    size = area
    while at + size + area <= len(rows):
        following = rows[at + size : at + size + area]
        times = {row[0] for row in following}
        if len(times) > 1 or min(times) < last + least or [row[1:] for row in following] != frame:
            break
        last, size = min(times), size + area
    longest = max(height, width)
    return size, tuple(sorted({t + longest, t + max(longest, last - t + 1)}))
