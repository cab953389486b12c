"""InfoNCE by definition, against worked values, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from oracle.case import Options
from oracle.losses import LossInputError, group_rows, infonce

# q1, p1, n1, q2, p2, n2 of the worked example; labels 1 0 1 0.
ROWS = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [0, 1], [0.6, 0.8], [1, 0]], dtype=torch.float64)
LABELS = [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(temperature=0.1), 2.142971),
        (Options(temperature=0.01), 20.0),
        (Options(temperature=1.0), 1.249748),
        (Options(temperature=1.0, use_batch=False), 0.371101),
    ],
)
def test_worked_values(options: Options, expected: float) -> None:
    assert infonce(ROWS, LABELS, options).item() == pytest.approx(expected, abs=5e-7)


def test_the_docstrings_example() -> None:
    rows = torch.tensor([[1, 0], [1, 0], [0, 1]], dtype=torch.float64)
    found = infonce(rows, [1.0, 0.0], Options(temperature=1.0)).item()
    assert found == pytest.approx(-math.log(math.e / (math.e + 1)))


def test_an_independent_sum_of_exponentials() -> None:
    similarities = (ROWS[[0, 3]] @ ROWS[[1, 2, 4, 5]].T / 0.5).tolist()
    by_hand = [
        -math.log(math.exp(row[t]) / sum(map(math.exp, row))) for row, t in zip(similarities, (0, 2), strict=True)
    ]
    assert infonce(ROWS, LABELS, Options(0.5)).item() == pytest.approx(sum(by_hand) / 2)


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        ([1, 0, 0, 1, 0], [[0, 1, 2, 3], [4, 5, 6]]),
        ([1, 1], [[0, 1], [2, 3]]),
        ([0.5, 0, 0.3], [[0, 1, 2], [3, 4]]),
    ],
)
def test_labels_say_which_rows_a_group_owns(labels: list[float], rows: list[list[int]]) -> None:
    total = len(labels) + len(rows)
    assert [list(group) for group in group_rows(labels, total)] == rows


@pytest.mark.parametrize(
    ("labels", "rows", "message"),
    [
        ([], 0, "no labels"),
        ([0, 1], 3, "first group has no positive"),
        ([1, 0, 1, 0], 5, "5 embeddings do not fit 4 labels in 2 groups.*needs 6.*Group 1 is the first without"),
        ([1, 0, 1, 0], 2, "Group 0 is the first without all its rows: it would end at row 2"),
        ([1, 0, 1, 0], 8, "Row 6 belongs to no group"),
        ([1.0, *[0.0] * 256] * 2, 260, "260 embeddings do not fit 514 labels in 2 groups.*needs 516"),
    ],
)
def test_labels_and_rows_that_do_not_fit_are_refused(labels: list[float], rows: int, message: str) -> None:
    with pytest.raises(LossInputError, match=message):
        infonce(torch.zeros(rows, 2, dtype=torch.float64), labels, Options())


def test_nan_is_refused_by_row() -> None:
    rows = ROWS.clone()
    rows[4, 1] = float("nan")
    with pytest.raises(LossInputError, match=r"embedding 4 holds NaN \(1 of 6 do\)"):
        infonce(rows, LABELS, Options())
