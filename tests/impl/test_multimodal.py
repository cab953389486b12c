"""Packing images: positions against the oracle's plain loops, order, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given

from impl.errors import PackingError
from impl.multimodal import in_stream_order, mrope, pack
from impl.packing import boundaries
from oracle import layout
from oracle.case import IMAGE_ID, Case, grids
from oracle.strategies import image_cases


@given(image_cases())
def test_positions_are_the_definitions(case: Case) -> None:
    for ids, own in zip(case.sequences, grids(case.sequences, case.images), strict=True):
        assert [tuple(token) for token in mrope(ids, own, IMAGE_ID).T.tolist()] == layout.mrope(ids, own)


@given(image_cases())
def test_what_is_packed_comes_apart(case: Case) -> None:
    images = grids(case.sequences, case.images)
    packed = pack(case.sequences, images, IMAGE_ID, order=case.stream.arranged(len(case.sequences)))
    assert packed.position_ids.shape == (4, sum(case.lengths))
    assert boundaries(packed.position_ids) == boundaries(packed.position_ids[1:]) == list(packed.lengths)
    assert in_stream_order(packed, images) == [grid for i in packed.order for grid in images[i]]


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ((5, IMAGE_ID), [(1, 2, 4)], r"sequence 1: 1 image tokens do not fit an image of \(1, 2, 4\) patches"),
        ((IMAGE_ID, 5, IMAGE_ID), [(1, 2, 2)], "sequence 1: 1 images, but the sequence holds another run"),
        ((5,), [(1, 2, 2)], "sequence 1: 1 images, but the sequence holds fewer runs"),
        ((IMAGE_ID,), [(1, 3, 2)], r"1 image tokens do not fit an image of \(1, 3, 2\) patches, merged by 2"),
        ((IMAGE_ID,), [(1, 2, 3)], r"1 image tokens do not fit an image of \(1, 2, 3\) patches, merged by 2"),
        ((IMAGE_ID,), [(1, 3, 3)], r"sequence 1: 1 image tokens do not fit an image of \(1, 3, 3\) patches"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    ids: tuple[int, ...], images: list[tuple[int, int, int]], message: str
) -> None:
    with pytest.raises(PackingError, match=message):
        pack([(5,), ids], [[], images], IMAGE_ID)


def test_vocabulary_and_merging_are_the_callers() -> None:
    packed = pack([(5, IMAGE_ID, IMAGE_ID)], [[(1, 2, 1)]], IMAGE_ID, merge=1, vocabulary=IMAGE_ID + 1)
    assert packed.position_ids.tolist() == [[0, 1, 2], [0, 1, 1], [0, 1, 2], [0, 1, 1]]
    with pytest.raises(PackingError, match="sequence 0 holds the id 5 at 0; the vocabulary has 5"):
        pack([(5,)], [[]], IMAGE_ID, vocabulary=5)


def test_every_sequence_needs_its_images() -> None:
    with pytest.raises(PackingError, match="images of 1 sequences for 2"):
        pack([(5,), (6,)], [[]], IMAGE_ID)
