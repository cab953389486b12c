"""Packing sequences that hold images: mRoPE positions, each sequence's from itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from impl.errors import PackingError
from impl.packing import Packed
from impl.packing import pack as pack_text

Grid = Sequence[int]
T = TypeVar("T")


def mrope(ids: Sequence[int], grids: Sequence[Grid], image_token: int, merge: int = 2) -> Tensor:
    """Positions [3, length] (temporal, height, width) of one sequence, as Qwen2.5-VL and Qwen3-VL number them.

    Args:
        ids: token ids; each run of ``image_token`` is one image.
        grids: the images' (frames, height, width) in patches, in order.
        merge: a token stands for merge x merge patches.

    Raises:
        PackingError: a run that is not as long as its image, or the wrong number of images.
    """
    pieces, images, now = [], iter(grids), 0
    for is_image, run in groupby(ids, key=lambda token: token == image_token):
        length = len(list(run))
        if not is_image:
            pieces.append(torch.arange(now, now + length).expand(3, -1))
            now += length
            continue
        grid = next(images, None)
        if grid is None:
            raise PackingError(f"{len(grids)} images, but the sequence holds another run of the image token")
        frames, height, width = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
        if frames * height * width != length or grid[1] % merge or grid[2] % merge:
            raise PackingError(f"{length} image tokens do not fit an image of {tuple(grid)} patches, merged by {merge}")
        axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
        pieces.append(torch.stack(axes).flatten(1) + now)
        now += max(height, width)
    if next(images, None) is not None:
        raise PackingError(f"{len(grids)} images, but the sequence holds fewer runs of the image token")
    return torch.cat(pieces, dim=1)


def pack(
    sequences: Sequence[Sequence[int]],
    grids: Sequence[Sequence[Grid]],
    image_token: int,
    merge: int = 2,
    order: Sequence[int] | str = "length",
    vocabulary: int | None = None,
) -> Packed:
    """``packing.pack`` with position ids [4, T]: the text's, then ``mrope`` of each sequence.

    Args:
        grids: each sequence's images.
    """
    if len(grids) != len(sequences):
        raise PackingError(f"images of {len(grids)} sequences for {len(sequences)}")
    packed = pack_text(sequences, order, 0, vocabulary)
    axes = []
    for i in packed.order:
        try:
            axes.append(mrope(sequences[i], grids[i], image_token, merge))
        except PackingError as error:
            raise PackingError(f"sequence {i}: {error}") from error
    return replace(packed, position_ids=torch.cat([packed.position_ids.unsqueeze(0), torch.cat(axes, dim=1)]))


def in_stream_order(packed: Packed, images: Sequence[Sequence[T]]) -> list[T]:
    """All sequences' images as the stream has them: what a model's pixel_values must follow."""
    return [image for i in packed.order for image in images[i]]
