"""Texts with images: positions of the wrong sequence, images in the wrong place, isolation for text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree, encoder, multimodal, packing
from impl.surface import _through_slots
from oracle.images import model_inputs
from tests.faults.base import merged, unit
from tests.faults.catalogue import planted

PADDED = "multimodal.images_and_text_equal_the_padded_ones"
ALONE = "multimodal.images_and_text_equal_each_sequence_alone"
Images = Sequence[Sequence[Any]]


class _Multimodal(PaddingFree):
    """Faults of ``embed``, which is given the packed batch and its images."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        shown = multimodal.in_stream_order(packed, images)
        return encoder.encode(model, packed, inputs=model_inputs([shown]))

    def encode_multimodal(
        self, model: PreTrainedModel, sequences: Any, images: Any, layout: Any, pooling: str = "last"
    ) -> Tensor:
        order = list(range(len(sequences)) if layout.order is None else layout.order)
        grids = [[image.grid for image in own] for own in images]
        packed = multimodal.pack(sequences, grids, model.config.image_token_id, order=order)
        return self.embed(model, _through_slots(packed, layout, model), images)


def _pieces(model: PreTrainedModel, packed: packing.Packed, images: Images) -> list[tuple[list[int], list[Any]]]:
    """Each sequence's ids and its images' grids, in stream order."""
    grids = iter([image.grid for image in multimodal.in_stream_order(packed, images)])
    found = []
    for piece in packed.input_ids.split(list(packed.lengths)):
        is_image = (piece == model.config.image_token_id).int()
        runs = int((torch.diff(is_image, prepend=torch.tensor([0])) == 1).sum())
        found.append((piece.tolist(), [next(grids) for _ in range(runs)]))
    return found


def _with_axes(packed: packing.Packed, axes: Sequence[Tensor]) -> packing.Packed:
    return replace(packed, position_ids=torch.cat([packed.position_ids[:1], torch.cat(list(axes), dim=1)]))


@planted(PADDED, "radixark/miles/pull/1272", smallest=[1, 1, 2])
class PositionsOverThePack(_Multimodal):
    """mRoPE is computed once over the whole packed row: text hides it, images do not."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        axes, now = [], 0
        for ids, grids in _pieces(model, packed, images):
            rows = multimodal.mrope(ids, grids, model.config.image_token_id)
            axes.append(rows + now)
            now += int(rows.max()) + 1
        return super().embed(model, _with_axes(packed, axes), images)


@planted(ALONE)
class ImagesInBatchOrder(_Multimodal):
    """The images come in the batch's order, the tokens in the stream's."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        shown = [image for own in images for image in own]
        return encoder.encode(model, packed, inputs=model_inputs([shown]))


@planted(PADDED, "hiyouga/LlamaFactory/pull/7754")
class OnlyTheFirstIsIndexed(_Multimodal):
    """Image positions are made where the mask is 1; packing marks the second sequence with 2."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        axes = [
            multimodal.mrope(ids, grids, model.config.image_token_id)
            if i == 0
            else torch.arange(len(ids)).expand(3, -1)
            for i, (ids, grids) in enumerate(_pieces(model, packed, images))
        ]
        return super().embed(model, _with_axes(packed, axes), images)


@planted(PADDED, "alibaba/ROLL/pull/452")
class RowsLeftBehind(_Multimodal):
    """Packing in another order moves ids, and leaves the three rows of position ids where they were."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        pieces = packed.position_ids[1:].split(list(packed.lengths), dim=1)
        return super().embed(model, _with_axes(packed, [pieces[place] for place in packed.places]), images)


@planted(PADDED, "axolotl-ai-cloud/axolotl/pull/3817")
class TextPositionsForImages(_Multimodal):
    """The multimodal index is left out: an image's tokens count on as text does."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        axes = [torch.arange(length).expand(3, -1) for length in packed.lengths]
        return super().embed(model, _with_axes(packed, axes), images)


@planted(ALONE, "huggingface/transformers/pull/44911", smallest=[1, 2])
class IsolationForTextAlone(_Multimodal):
    """Packed sequences are looked for in the text's row alone; with images there is none, and all see all before."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        shown = multimodal.in_stream_order(packed, images)
        states = encoder.hidden_states(model, merged(packed), inputs=model_inputs([shown]))
        return unit(encoder.pool(states, packed))


@planted(PADDED)
class TextGoesOnAfterTheHeight(_Multimodal):
    """After an image the text's positions go on after its height, where it may be wider than high."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Images) -> Tensor:
        axes = []
        for ids, grids in _pieces(model, packed, images):
            rows = multimodal.mrope(ids, grids, model.config.image_token_id)
            is_image = torch.tensor(ids) == model.config.image_token_id
            ends = [at for at, (a, b) in enumerate(pairwise(is_image.tolist()), 1) if a and not b]
            for end, (_, height, width) in zip(ends, grids, strict=False):
                rows = torch.cat([rows[:, :end], rows[:, end:] - max(0, width - height) // 2], dim=1)
            axes.append(rows)
        return super().embed(model, _with_axes(packed, axes), images)
