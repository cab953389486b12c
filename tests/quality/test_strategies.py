"""The generators are tested too: what they draw how often, and how far they shrink."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from oracle.case import Case
from oracle.strategies import cases
from tests.drawing import drawn as draw

DRAWS = 600


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return draw(cases(), DRAWS)


def _in_stream(case: Case) -> list[int]:
    return [case.lengths[i] for i in case.stream.arranged(len(case.lengths))]


FEATURES: dict[str, tuple[float, Callable[[Case], bool]]] = {
    "a one-token sequence": (0.80, lambda c: 1 in c.lengths),
    "two adjacent ones in the stream": (0.40, lambda c: (1, 1) in pairwise(_in_stream(c))),
    "three adjacent ones in the stream": (
        0.15,
        lambda c: (1, 1, 1) in zip(*(_in_stream(c)[i:] for i in range(3)), strict=False),
    ),
    "all of one token": (0.02, lambda c: set(c.lengths) == {1}),
    "all of one length above one": (0.04, lambda c: len(set(c.lengths)) == 1 and c.lengths[0] > 1),
    "every text closed by the pad's id": (0.08, lambda c: all(ids[-1] == 0 for ids in c.sequences)),
    "a one-token sequence first": (0.30, lambda c: _in_stream(c)[0] == 1),
    "a one-token sequence last": (0.30, lambda c: _in_stream(c)[-1] == 1),
    "two equal lengths above one": (
        0.40,
        lambda c: len([x for x in c.lengths if x > 1]) > len({x for x in c.lengths if x > 1}),
    ),
    "one giant among ones": (0.01, lambda c: c.lengths.count(1) == len(c.lengths) - 1 and max(c.lengths) > 8),
    "a power of two above one": (0.40, lambda c: any(x in (2, 4, 8, 16, 32) for x in c.lengths)),
    "a power of two and one": (0.30, lambda c: any(x in (3, 5, 9, 17, 33) for x in c.lengths)),
    "longer than every window": (0.50, lambda c: max(c.lengths) > 8),
    "exactly two sequences": (0.02, lambda c: len(c.lengths) == 2),
    "a dozen sequences or more": (0.15, lambda c: len(c.lengths) >= 12),
    "slots at the tail": (0.20, lambda c: c.stream.tail > 1),
    "slots after each sequence": (0.20, lambda c: c.stream.each > 1),
    "another order": (0.25, lambda c: c.stream.order not in (None, tuple(range(len(c.lengths))))),
    "special ids among the tokens": (0.08, lambda c: any(min(s) < 3 for s in c.sequences)),
    "texts that begin alike": (0.10, lambda c: len({s[0] for s in c.sequences}) == 1),
    "longer than sixty": (0.02, lambda c: max(c.lengths) > 60),
    "left padding": (0.25, lambda c: c.rows.side == "left"),
    "extra columns": (0.40, lambda c: c.rows.extra > 0),
    "junk in the pads": (0.40, lambda c: c.rows.junk > 0),
    "a group without negatives": (0.20, lambda c: any(not g.negatives for g in c.groups)),
    "groups of different sizes": (0.40, lambda c: len({len(g.negatives) for g in c.groups}) > 1),
    "one group": (0.10, lambda c: len(c.groups) == 1),
    "the rest of the batch left out": (0.30, lambda c: not c.options.use_batch),
    "a temperature that is no power of two": (0.30, lambda c: c.options.temperature in (0.1, 0.05, 0.01)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_drawn_often_enough(feature: str, drawn: list[Case]) -> None:
    floor, has = FEATURES[feature]
    share = sum(map(has, drawn)) / len(drawn)
    assert share >= floor, f"{feature}: {share:.3f} of {len(drawn)} cases, floor {floor}"


def test_neighbouring_tokens_differ(drawn: list[Case]) -> None:
    for case in drawn:
        for sequence in case.sequences:
            assert all(a != b for a, b in pairwise(sequence))


@pytest.mark.parametrize(
    ("predicate", "smallest"),
    [
        (lambda c: True, [1, 1]),
        (lambda c: (1, 1) in pairwise(_in_stream(c)), [1, 1]),
        (lambda c: max(c.lengths) > 1, [1, 2]),
        (lambda c: len(c.groups) > 1, [1, 1, 1, 1]),
        (lambda c: any(len(g.negatives) > 1 for g in c.groups), [1, 1, 1, 1]),
        (lambda c: max(c.lengths) > 8, [1, 9]),
    ],
)
def test_shrinking_reaches_the_known_minimum(predicate: Callable[[Case], bool], smallest: list[int]) -> None:
    found = find(cases(), predicate, settings=settings(max_examples=2000, database=None, derandomize=True))
    assert sorted(found.lengths) == smallest
    assert found.rows.side == "right"
    assert (found.rows.extra, found.rows.junk, found.stream.tail, found.stream.each, found.seed) == (0, 0, 1, 1, 0)


def test_values_come_from_the_case_and_not_from_global_state() -> None:
    assert isinstance(cases(), st.SearchStrategy)
    first, second = (
        find(cases(), lambda c: len(c.lengths) > 5, settings=settings(database=None, derandomize=True))
        for _ in range(2)
    )
    assert first == second
    with pytest.raises(NoSuchExample):
        find(cases(longest=4), lambda c: max(c.lengths) > 4, settings=settings(max_examples=200, database=None))
