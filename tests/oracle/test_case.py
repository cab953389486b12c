"""Cases: JSON both ways, and what they refuse."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given

from oracle.case import Case, CaseError, Group, Options, Rows, Stream, distinct_ids, from_lengths
from oracle.founding import founding_case
from oracle.strategies import cases


@given(cases())
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
        (lambda: Case(()), "at least one group"),
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


def test_neighbouring_ids_differ_and_small_ids_are_left_out() -> None:
    ids = distinct_ids(500, 128)
    assert all(a != b for a, b in itertools.pairwise(ids))
    assert min(ids) == 3
    assert max(ids) == 127
    assert len(set(ids[:125])) == 125


def test_json_is_small_enough_to_paste() -> None:
    assert len(json.loads(from_lengths([[1, 1]]).to_json())["groups"]) == 1
    assert len(from_lengths([[1, 1]]).to_json()) < 500
