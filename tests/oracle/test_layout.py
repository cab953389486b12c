"""Layouts, by hand and as properties: the integers are checked directly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from oracle.case import IMAGE_ID, Case, Rows, Stream, grids
from oracle.laws.law import picture
from oracle.layout import mrope, packed_stream, padded_rows
from oracle.models import VISUAL, VOCABULARY, tiny
from oracle.strategies import cases, image_cases

SEQUENCES = [(11, 12, 13), (21,), (31, 32)]


def test_rows_padded_right() -> None:
    rows = padded_rows(SEQUENCES, Rows("right", extra=1), 100, pad_id=9)
    assert rows.input_ids.tolist() == [[11, 12, 13, 9], [21, 9, 9, 9], [31, 32, 9, 9]]
    assert rows.attention_mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert (rows.first, rows.last) == ([0, 0, 0], [2, 0, 1])
    axes = padded_rows(SEQUENCES, Rows(), 100, grids=[[], [], []]).position_ids
    assert {x.dtype for x in (rows.input_ids, rows.attention_mask, rows.position_ids, axes)} == {torch.int64}


def test_rows_padded_left_with_positions_from_two() -> None:
    rows = padded_rows(SEQUENCES, Rows("left"), 100, first_position=2)
    assert rows.input_ids.tolist() == [[11, 12, 13], [0, 0, 21], [0, 31, 32]]
    assert rows.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert rows.position_ids.tolist() == [[2, 3, 4], [2, 2, 2], [2, 2, 3]]
    assert (rows.first, rows.last) == ([0, 2, 1], [2, 2, 2])


def test_a_stream_without_slots() -> None:
    stream = packed_stream(SEQUENCES, Stream((2, 0, 1)), 100)
    assert stream.input_ids.tolist() == [31, 32, 11, 12, 13, 21]
    assert stream.position_ids.tolist() == [0, 1, 0, 1, 2, 0]
    assert (stream.starts, stream.lengths) == ([2, 5, 0], [3, 1, 2])


def test_a_stream_with_slots_after_each_sequence_and_at_the_tail() -> None:
    stream = packed_stream(SEQUENCES, Stream(each=2, tail=5), 100, slot_id=9)
    assert stream.input_ids.tolist() == [11, 12, 13, 9, 21, 9, 31, 32, 9, 9]
    assert stream.position_ids.tolist() == [0, 1, 2, -1, 0, -1, 0, 1, -1, -1]
    assert picture(stream.position_ids.tolist(), [3, 1, 2]) == "|0 1 2|.|0|.|0 1|. ."


@given(cases())
def test_real_tokens_stand_where_the_layout_says(case: Case) -> None:
    rows = padded_rows(case.sequences, case.rows, VOCABULARY)
    stream = packed_stream(case.sequences, case.stream, VOCABULARY)
    for i, ids in enumerate(case.sequences):
        assert tuple(rows.input_ids[i, rows.first[i] : rows.last[i] + 1].tolist()) == ids
        assert rows.attention_mask[i].sum() == len(ids)
        span = slice(stream.starts[i], stream.starts[i] + stream.lengths[i])
        assert tuple(stream.input_ids[span].tolist()) == ids
        assert stream.position_ids[span].tolist() == list(range(len(ids)))
    assert (stream.position_ids >= 0).sum() == sum(case.lengths)
    assert len(stream.position_ids) % case.stream.tail == 0
    assert all(start % case.stream.each == 0 for start in stream.starts)


def test_junk_fills_pads_and_slots_and_nothing_else() -> None:
    plain, junk = (padded_rows(SEQUENCES, Rows(extra=4, junk=j), 100) for j in (0, 3))
    real = plain.attention_mask.bool()
    assert (plain.input_ids[real] == junk.input_ids[real]).all()
    assert (junk.input_ids[~real] > 0).any()
    slots, filled = (packed_stream(SEQUENCES, Stream(each=8, junk=j), 100) for j in (0, 3))
    real = slots.position_ids >= 0
    assert (slots.input_ids[real] == filled.input_ids[real]).all()
    assert (filled.input_ids[~real] > 0).any()


def test_pictures_are_cut_where_a_line_ends() -> None:
    assert picture([0, 0], [1, 1]) == "|0|0|"
    assert picture([0, 0], [2]) == "|0 0|"
    assert picture([0, 1, -1, 0]) == "|0 1|.|0|"
    assert len(picture([0] * 500)) == 72


def test_pads_at_the_tail_may_be_numbered_like_a_sequence() -> None:
    for pads, numbers in (("slots", [-1, -1, -1]), ("counted", [0, 1, 2]), ("zeros", [0, 0, 0])):
        stream = packed_stream(SEQUENCES, Stream(tail=9, pads=pads), 100, slot_id=7)
        assert stream.position_ids.tolist() == [0, 1, 2, 0, 0, 1, *numbers]
        assert stream.input_ids.tolist() == [11, 12, 13, 21, 31, 32, 7, 7, 7]


# --- mRoPE ------------------------------------------------------------------------------------------

PICTURE = (5, *[IMAGE_ID] * 6, 6)


def test_mrope_by_hand() -> None:
    """One token, an image of two rows of three tokens, one token: text goes on after the longer side."""
    assert mrope(PICTURE, [(1, 4, 6)]) == [
        (0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 2, 2), (1, 2, 3), (4, 4, 4)
    ]  # fmt: skip
    assert mrope((IMAGE_ID, IMAGE_ID, 5), [(2, 2, 2)]) == [(0, 0, 0), (1, 0, 0), (1, 1, 1)]


def test_streams_of_three_and_four_rows() -> None:
    arguments = ([PICTURE[:1], PICTURE[1:]], Stream((1, 0), each=4), 100, 0, 0, [[], [(1, 4, 6)]])
    three, four = (packed_stream(*arguments, rows=rows).position_ids.tolist() for rows in (3, 4))  # type: ignore[arg-type]
    assert three == [
        [0, 0, 0, 0, 0, 0, 3, -1, 0, -1, -1, -1],
        [0, 0, 0, 1, 1, 1, 3, -1, 0, -1, -1, -1],
        [0, 1, 2, 0, 1, 2, 3, -1, 0, -1, -1, -1],
    ]
    assert four == [[0, 1, 2, 3, 4, 5, 6, -1, 0, -1, -1, -1], *three]


def test_a_stream_of_several_rows_without_images_or_with_frames_apart() -> None:
    text = packed_stream(SEQUENCES, Stream(), 100, first_position=2, rows=4).position_ids.tolist()
    assert text == [[2, 3, 4, 2, 2, 3], *[[0, 1, 2, 0, 0, 1]] * 3]
    alone = packed_stream([(IMAGE_ID, 5)], Stream(), 100).position_ids
    assert alone.tolist() == [0, 1], "one row needs no images"
    video = ([(IMAGE_ID, IMAGE_ID)], Stream(), 100)
    for apart in (1, 2, 5):
        stream = packed_stream(*video, grids=[[(2, 2, 2)]], rows=3, interval=apart)
        assert stream.position_ids.tolist() == [[0, apart], [0, 0], [0, 0]]
    assert packed_stream(*video, grids=[[(2, 2, 2)]], rows=3).position_ids.tolist() == [[0, 1], [0, 0], [0, 0]]


def test_slots_hold_an_id_of_ones_choice() -> None:
    assert packed_stream([(11,)], Stream(tail=3), 100).input_ids.tolist() == [11, 0, 0]
    assert packed_stream([(11,)], Stream(tail=3, slot=8, junk=1), 100).input_ids.tolist() == [11, 8, 8]


@pytest.mark.parametrize("name", VISUAL)
@given(case=image_cases(slots=False))
def test_mrope_is_the_models_own(name: str, case: Case) -> None:
    """An outside source of truth: get_rope_index of the model, on padded rows."""
    images = grids(case.sequences, case.images)
    rows = padded_rows(case.sequences, case.rows, VOCABULARY, grids=images)
    thw = torch.tensor([grid for own in images for grid in own])
    kinds = (rows.input_ids == IMAGE_ID).int()
    expected, _ = tiny(name).get_rope_index(
        rows.input_ids, kinds, image_grid_thw=thw, attention_mask=rows.attention_mask
    )
    assert torch.equal(rows.position_ids * rows.attention_mask, expected * rows.attention_mask)
