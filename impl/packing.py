"""Packing: many sequences as one stream, boundaries kept from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from impl.errors import BoundaryError, PackingError

SLOT = -1


@dataclass(frozen=True)
class Packed:
    """A packed batch without slots.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], counting from the model's first position in every sequence.
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
    input_ids: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None, first_position: int = 0
) -> Packed:
    """A batch that somebody else packed, with or without slots (position id -1), slots removed.

    Give ``lengths`` where they are known: then only the slots are looked for in ``position_ids``.
    Without them the boundaries are recovered by ``boundaries``, or refused.

    Args:
        input_ids, position_ids: int64 [T].
        lengths: real tokens of each sequence, in stream order.
    """
    if input_ids.shape != position_ids.shape or input_ids.dim() != 1:
        shapes = f"{tuple(input_ids.shape)} and {tuple(position_ids.shape)}"
        raise BoundaryError(f"input_ids and position_ids must be vectors of one length, found {shapes}")
    real = position_ids != SLOT
    if lengths is None:
        lengths = boundaries(position_ids, first_position=first_position)
    elif sum(lengths) != int(real.sum()):
        raise BoundaryError(f"lengths sum to {sum(lengths)}, the stream holds {int(real.sum())} real tokens")
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(input_ids.device)
    return Packed(input_ids[real], position_ids[real], ends, tuple(lengths), tuple(range(len(lengths))))


def boundaries(
    position_ids: Tensor | Sequence[int] | None = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    total: int | None = None,
    first_position: int = 0,
    count: int | None = None,
) -> list[int]:
    """The sequences' lengths, from position ids or from cu_seqlens: exactly, or not at all.

    Position ids count from ``first_position`` in every sequence, so a sequence begins wherever that
    value stands (a one-token sequence beside another is 0, 0: no decrease, but a beginning). A slot is
    -1 and may follow a sequence, never precede the first or stand inside one. Whatever does not read so
    is refused. What position ids cannot show, an empty sequence or one that counts on where its
    neighbour stopped, is refused if ``count`` says how many sequences there are.

    Args:
        position_ids: [T] integers.
        cu_seqlens: [n + 1] integers instead: from 0, rising, to ``total`` where that is given.
        count: the number of sequences, if known.

    Raises:
        BoundaryError: names the slot, or the sequence.
    """
    if (position_ids is None) == (cu_seqlens is None):
        raise BoundaryError("give either position_ids or cu_seqlens")
    if cu_seqlens is not None:
        lengths = _from_cu_seqlens(_integers(cu_seqlens, "cu_seqlens"), total)
    else:
        assert position_ids is not None
        lengths = _from_positions(_integers(position_ids, "position_ids"), first_position)
    if count is not None and len(lengths) != count:
        raise BoundaryError(
            f"{len(lengths)} sequences found where {count} were packed: one is empty or counts on from its neighbour"
        )
    return lengths


def _integers(values: Tensor | Sequence[int], name: str) -> list[int]:
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point():
            raise BoundaryError(f"{name} must be a vector of integers, found {values.dtype} {tuple(values.shape)}")
        return [int(v) for v in values.tolist()]
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


def _from_positions(positions: list[int], first: int) -> list[int]:
    if not positions:
        raise BoundaryError("position_ids is empty: there is no sequence")
    lengths: list[int] = []
    before = None
    for at, position in enumerate(positions):
        if position == first:
            lengths.append(1)
        elif position == SLOT:
            if before is None:
                raise BoundaryError("slot 0 is -1 before any sequence: slots may only follow one")
        elif before is None:
            raise BoundaryError(f"slot 0 holds position {position}; a sequence begins at {first}")
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
