"""Cases: JSON both ways, and what they refuse."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.case import (
    IMAGE_ID,
    Case,
    CaseError,
    Group,
    Mesh,
    Options,
    Rows,
    Stream,
    distinct_ids,
    from_lengths,
    from_parts,
    grids,
)
from oracle.founding import founding_case
from oracle.strategies import cases, image_cases, mesh_cases


@given(st.one_of(cases(), image_cases(), mesh_cases(((2, 2, 1), (1, 2, 2)))))
def test_json_gives_back_the_same_case(case: Case) -> None:
    assert Case.from_json(case.to_json()) == case


def test_the_founding_case_survives_json() -> None:
    assert Case.from_json(founding_case().to_json()) == founding_case()


def test_defaults_may_be_left_out_of_json() -> None:
    case = Case.from_json('{"groups": [{"anchor": [5], "positive": [6, 7]}]}')
    assert case == Case((Group((5,), (6, 7)),))


def test_sequences_labels_and_lengths_in_row_order() -> None:
    case = Case((Group((1,), (2, 3), ((4,), (5, 6, 7)), label=0.5), Group((8,), (9,))))
    assert case.sequences == [(1,), (2, 3), (4,), (5, 6, 7), (8,), (9,)]
    assert case.lengths == [1, 2, 1, 3, 1, 1]
    assert case.labels == [0.5, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Case(()), "^a case needs at least one group$"),
        (
            lambda: Case((Group((1,), (2,), ((3,),)),), options=Options(loss="contrastive")),
            "^group 0 has negatives; contr",
        ),
        (lambda: Options(loss="best"), "^loss must be one of infonce, .*, contrastive, .*, found 'best'$"),
        (lambda: Options(hard_negatives=0), "^hard_negatives must be at least 1, found 0$"),
        (lambda: Options(matryoshka=((0, 1.0),)), "^matryoshka dimensions must be positive, found 0$"),
        (lambda: Mesh(ulysses=0), "sizes must be at least 1"),
        (lambda: Mesh(data=0), "sizes must be at least 1"),
        (lambda: Case((Group((), (1,)),)), "group 0: its anchor is empty"),
        (lambda: Case((Group((1,), (2,)), Group((1,), ()))), "group 1: its positive is empty"),
        (lambda: Case((Group((1,), (2,), ((3,), ())),)), "group 0: its negative 1 is empty"),
        (lambda: Case((Group((1,), (-2,)),)), "group 0: its positive holds the token id -2"),
        (lambda: Case((Group((1,), (2,), label=0),)), "group 0: label 0 marks a negative"),
        (lambda: Options(temperature=0), "temperature must be positive"),
        (lambda: Options(temperature=float("nan")), "temperature must be positive"),
        (lambda: Options(pooling="best"), "pooling must be one of last, mean, cls"),
        (lambda: Rows("top"), "side must be right or left"),
        (lambda: Rows(extra=-1), "cannot be negative"),
        (lambda: Stream(tail=0), "multiples must be at least 1"),
        (lambda: Case((Group((1,), (2,)),), stream=Stream((0, 0))), "not a permutation of 2"),
        (lambda: from_lengths([[3]]), "group 0 has 1 sequences"),
        (lambda: Case.from_json("{"), "not JSON"),
        (lambda: Case.from_json("[]"), "not a case"),
        (lambda: Case.from_json('{"groups": [{"anchor": [1]}]}'), "not a case.*positive"),
        (
            lambda: Case.from_json('{"groups": [{"anchor": [1], "positive": [2], "foo": 1}]}'),
            "unknown group fields.*foo",
        ),
        (lambda: Case.from_json('{"groups": [{"anchor": [1], "positive": [2]}], "rows": {"s": 1}}'), "not a case"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(make: object, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        make()  # type: ignore[operator]


def test_ids_of_a_case_from_lengths() -> None:
    assert distinct_ids(5, 128) == [80, 32, 109, 61, 13]
    assert from_lengths([[2, 1, 2]]).sequences == [(80, 32), (109,), (61, 13)]
    assert from_lengths([[2, 1, 2]], alike=True).sequences == [(80, 32), (80,), (80, 32)]
    assert from_lengths([[2, 1, 2]], end=9).sequences == [(80, 9), (9,), (61, 9)]
    assert from_lengths([[1, 1]], vocabulary=20, first=10).sequences == [(17,), (14,)]
    assert from_lengths([[1, 1]], seed=7).seed == 7
    assert Options(matryoshka=((1, 1.0),)).matryoshka == ((1, 1.0),)


def test_neighbouring_ids_differ_and_small_ids_are_left_out() -> None:
    ids = distinct_ids(500, 128)
    assert all(a != b for a, b in itertools.pairwise(ids))
    assert min(ids) == 3
    assert max(ids) == 127
    assert len(set(ids[:125])) == 125


def test_json_is_small_enough_to_paste() -> None:
    case = Case((Group((5,), (6, 7)),), stream=Stream((1, 0)))
    assert case.to_json() == '{"groups":[{"anchor":[5],"positive":[6,7]}],"stream":{"order":[1,0]}}'


def test_matryoshka_and_labels_survive_json() -> None:
    case = Case((Group((5,), (6,), label=0.5),), options=Options(matryoshka=((4, 0.5), (8, 1.0))))
    assert Case.from_json(case.to_json()) == case


def test_a_case_is_loaded_from_a_file(tmp_path: Path) -> None:
    case = from_lengths([[1, 2]])
    (tmp_path / "case.json").write_text(case.to_json())
    assert Case.load(tmp_path / "case.json") == Case.load(str(tmp_path / "case.json")) == case


def test_parts_are_text_and_images() -> None:
    case = from_parts([[[2], [(1, 2, 4), 1, (1, 2, 2)]]])
    assert case.lengths == [2, 4]
    assert case.sequences[1] == (IMAGE_ID, IMAGE_ID, case.sequences[1][2], IMAGE_ID)
    assert grids(case.sequences, case.images) == [[], [(1, 2, 4), (1, 2, 2)]]
    assert max(from_parts([[[200], [1]]]).sequences[0]) == 127


@pytest.mark.parametrize(
    ("sequences", "images", "message"),
    [
        ([(5,), (IMAGE_ID,)], [(1, 2, 4)], r"sequence 1: 1 image tokens do not fit image 0 of \(1, 2, 4\) patches"),
        ([(5,), (IMAGE_ID,)], [(1, 1, 4)], r"sequence 1: 1 image tokens do not fit image 0 of \(1, 1, 4\) patches"),
        ([(5,), (IMAGE_ID, 6, IMAGE_ID)], [(1, 2, 2)], "sequence 1 holds image tokens, but all 1 images are used up"),
        ([(5,), (6,)], [(1, 2, 2)], "1 images for 0 runs of the image token"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    sequences: list[tuple[int, ...]], images: list[tuple[int, int, int]], message: str
) -> None:
    with pytest.raises(CaseError, match=message):
        Case((Group(sequences[0], sequences[1]),), images=tuple(images))


def test_a_mesh_counts_its_ranks() -> None:
    assert (Mesh(2, 3, 2).sharing, Mesh(2, 3, 2).ranks) == (6, 12)
    with pytest.raises(CaseError, match="must be at least 1"):
        Mesh(ring=0)
    with pytest.raises(CaseError, match="pads must be one of slots, counted, zeros"):
        Stream(pads="ones")
