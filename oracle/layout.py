"""How a case is laid out: padded rows, or one packed stream with or without slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.case import IMAGE_ID, Grid, Rows, Stream


@dataclass(frozen=True)
class PaddedRows:
    """input_ids, attention_mask (1 real, 0 pad), position_ids: int64 [n, width]; first, last: column of
    each row's first and last real token. With images position_ids are [3, n, width]."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    first: list[int]
    last: list[int]


@dataclass(frozen=True)
class PackedStream:
    """input_ids, position_ids: int64 [T] (position_ids [3, T] or [4, T] for mRoPE); a slot is -1.

    starts, lengths: where each sequence stands in the stream, in row order (not stream order).
    """

    input_ids: Tensor
    position_ids: Tensor
    starts: list[int]
    lengths: list[int]


def mrope(ids: Sequence[int], grids: Sequence[Grid], interval: int = 1) -> list[tuple[int, int, int]]:
    """Positions (temporal, height, width) of one sequence's tokens, from the sequence alone.

    Text counts on all three axes at once; an image's token stands at its frame, row and column, counted from
    where the image begins, two by two patches a token; text goes on after its longer side. Frames are
    ``interval`` apart: 1, or in a video of Qwen2.5-VL tokens a second times seconds a frame.
    (``get_rope_index`` of Qwen2.5-VL and Qwen3-VL in transformers 5.24.)
    """
    positions: list[tuple[int, int, int]] = []
    images = iter(grids)
    now = at = 0
    while at < len(ids):
        if ids[at] != IMAGE_ID:
            positions.append((now, now, now))
            now, at = now + 1, at + 1
            continue
        frames, height, width = next(images)
        for frame in range(frames):
            for row in range(height // 2):
                for column in range(width // 2):
                    positions.append((now + interval * frame, now + row, now + column))
                    at += 1
        now += max(height, width) // 2
    return positions


def padded_rows(
    sequences: Sequence[Sequence[int]],
    layout: Rows,
    vocabulary: int,
    pad_id: int = 0,
    first_position: int = 0,
    grids: Sequence[Sequence[Grid]] | None = None,
) -> PaddedRows:
    """Row i holds sequence i; pads have attention 0 and the position id of a first token.

    ``first_position`` is the position id of a first token (2 for XLM-RoBERTa). ``grids``: each sequence's
    images; then positions are mRoPE's.
    """
    width = max(len(ids) for ids in sequences) + layout.extra
    fill = _filler(len(sequences) * width, layout.junk, vocabulary, pad_id).view(len(sequences), width)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    positions = torch.full_like(mask, first_position)
    axes = torch.zeros(3, *mask.shape, dtype=torch.int64)
    first, last = [], []
    for i, ids in enumerate(sequences):
        start = 0 if layout.side == "right" else width - len(ids)
        stop = start + len(ids)
        fill[i, start:stop] = torch.tensor(ids)
        mask[i, start:stop] = 1
        positions[i, start:stop] = torch.arange(len(ids)) + first_position
        if grids is not None:
            axes[:, i, start:stop] = torch.tensor(mrope(ids, grids[i])).T
        first.append(start)
        last.append(stop - 1)
    return PaddedRows(fill, mask, positions if grids is None else axes, first, last)


def packed_stream(
    sequences: Sequence[Sequence[int]],
    layout: Stream,
    vocabulary: int,
    slot_id: int = 0,
    first_position: int = 0,
    grids: Sequence[Sequence[Grid]] | None = None,
    rows: int = 1,
    interval: int = 1,
) -> PackedStream:
    """Sequences one after another in ``layout.order``, with the slots it asks for.

    rows: 1, the text's positions; 3, mRoPE's of each sequence with its ``grids`` and frames ``interval``
    apart; 4, both.
    """
    ids: list[int] = []
    positions: list[tuple[int, ...]] = []
    slots: list[int] = []
    starts = [0] * len(sequences)

    def add_slots(number: Sequence[int]) -> None:
        slots.extend(range(len(ids), len(ids) + len(number)))
        ids.extend([slot_id] * len(number))
        positions.extend((position,) * rows for position in number)

    for i in layout.arranged(len(sequences)):
        starts[i] = len(ids)
        ids += sequences[i]
        text = [(position,) for position in range(first_position, first_position + len(sequences[i]))]
        axes = mrope(sequences[i], grids[i] if grids else (), interval) if rows > 1 else []
        positions += text if rows == 1 else axes if rows == 3 else [a + b for a, b in zip(text, axes, strict=True)]
        add_slots([-1] * (-len(sequences[i]) % layout.each))
    missing = -len(ids) % layout.tail
    add_slots({"slots": [-1] * missing, "counted": range(missing), "zeros": [0] * missing}[layout.pads])
    stream, places = torch.tensor(ids), torch.tensor(positions).T
    stream[slots] = _filler(len(ids), layout.junk, vocabulary, slot_id)[slots] if layout.slot is None else layout.slot
    return PackedStream(stream, places[0] if rows == 1 else places, starts, [len(s) for s in sequences])


def _filler(count: int, junk: int, vocabulary: int, pad_id: int) -> Tensor:
    if junk == 0:
        return torch.full((count,), pad_id)
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(junk))
