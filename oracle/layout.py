"""How a case is laid out: padded rows, or one packed stream with or without slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.case import Rows, Stream


@dataclass(frozen=True)
class PaddedRows:
    """input_ids, attention_mask (1 real, 0 pad), position_ids: int64 [n, width]; first, last: column of
    each row's first and last real token."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    first: list[int]
    last: list[int]


@dataclass(frozen=True)
class PackedStream:
    """input_ids, position_ids: int64 [T]; a slot has position id -1.

    starts, lengths: where each sequence stands in the stream, in row order (not stream order).
    """

    input_ids: Tensor
    position_ids: Tensor
    starts: list[int]
    lengths: list[int]


def padded_rows(
    sequences: Sequence[Sequence[int]], layout: Rows, vocabulary: int, pad_id: int = 0, first_position: int = 0
) -> PaddedRows:
    """Row i holds sequence i; pads have attention 0 and the position id of a first token.

    ``first_position`` is the position id of a first token (2 for XLM-RoBERTa).
    """
    width = max(len(ids) for ids in sequences) + layout.extra
    fill = _filler(len(sequences) * width, layout.junk, vocabulary, pad_id).view(len(sequences), width)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    positions = torch.full_like(mask, first_position)
    first, last = [], []
    for i, ids in enumerate(sequences):
        start = 0 if layout.side == "right" else width - len(ids)
        stop = start + len(ids)
        fill[i, start:stop] = torch.tensor(ids)
        mask[i, start:stop] = 1
        positions[i, start:stop] = torch.arange(len(ids)) + first_position
        first.append(start)
        last.append(stop - 1)
    return PaddedRows(fill, mask, positions, first, last)


def packed_stream(
    sequences: Sequence[Sequence[int]], layout: Stream, vocabulary: int, slot_id: int = 0, first_position: int = 0
) -> PackedStream:
    """Sequences one after another in ``layout.order``, with the slots it asks for."""
    ids: list[int] = []
    positions: list[int] = []
    starts = [0] * len(sequences)
    for i in layout.arranged(len(sequences)):
        starts[i] = len(ids)
        ids += sequences[i]
        positions += range(first_position, first_position + len(sequences[i]))
        missing = -len(sequences[i]) % layout.each
        ids += [slot_id] * missing
        positions += [-1] * missing
    missing = -len(ids) % layout.tail
    ids += [slot_id] * missing
    positions += [-1] * missing
    stream, places = torch.tensor(ids), torch.tensor(positions)
    junk = _filler(len(ids), layout.junk, vocabulary, slot_id)
    return PackedStream(torch.where(places < 0, junk, stream), places, starts, [len(s) for s in sequences])


def _filler(count: int, junk: int, vocabulary: int, pad_id: int) -> Tensor:
    if junk == 0:
        return torch.full((count,), pad_id)
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(junk))
