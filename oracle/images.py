"""Images of a case: made-up patches from its seed, and how a model wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.case import Case, Grid, grids
from oracle.models import PATCH_NUMBERS


@dataclass(frozen=True)
class Image:
    """grid: patches (frames, height, width). patches: float64 [frames * height * width, numbers]."""

    grid: Grid
    patches: Tensor


Images = Sequence[Sequence[Image]]


def images_of(case: Case) -> list[list[Image]]:
    """Each sequence's images; patches are integers over 256 drawn from the case's seed."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(grid: Grid) -> Image:
        frames, height, width = grid
        numbers = torch.randint(-128, 129, (frames * height * width, PATCH_NUMBERS), generator=generator)
        return Image(grid, numbers.double() / 256)

    return [[draw(grid) for grid in own] for own in grids(case.sequences, case.images)]


def grids_of(images: Images | None) -> list[list[Grid]] | None:
    """The grids alone."""
    return None if images is None else [[image.grid for image in own] for own in images]


def model_inputs(images: Images | None) -> dict[str, Tensor]:
    """``pixel_values`` [patches, numbers] and ``image_grid_thw`` [images, 3] in the sequences' order."""
    shown = [image for own in images or () for image in own]
    if not shown:
        return {}
    return {
        "pixel_values": torch.cat([image.patches for image in shown]),
        "image_grid_thw": torch.tensor([image.grid for image in shown]),
    }
