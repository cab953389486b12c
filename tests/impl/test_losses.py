"""The vectorised InfoNCE: equal to its definition, and strict."""

from __future__ import annotations

import pytest
import torch

from impl import infonce
from impl.errors import EmbeddingError, LabelError

ROWS = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [0, 1], [0.6, 0.8], [1, 0]], dtype=torch.float64)
LABELS = [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("temperature", "use_batch", "expected"),
    [(0.1, True, 2.142971), (0.01, True, 20.0), (1.0, True, 1.249748), (1.0, False, 0.371101)],
)
def test_worked_values(temperature: float, use_batch: bool, expected: float) -> None:
    for labels in (LABELS, torch.tensor(LABELS)):
        assert infonce(ROWS, labels, temperature, use_batch).item() == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(
    ("labels", "rows", "message"),
    [
        ([], 0, "must begin with a positive.*found none"),
        ([0.0, 1.0], 3, "must begin with a positive.*found 0.0"),
        (LABELS, 5, "5 embeddings do not fit 4 labels in 2 groups, which need 6: group 1 lacks rows"),
        (LABELS, 2, "group 0 lacks rows"),
        (LABELS, 8, "row 6 belongs to no group"),
        ([1.0, *[0.0] * 256] * 2, 260, "260 embeddings do not fit 514 labels in 2 groups, which need 516"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: list[float], rows: int, message: str) -> None:
    with pytest.raises(LabelError, match=message):
        infonce(torch.zeros(rows, 2), labels)


def test_nan_is_refused_by_row() -> None:
    rows = ROWS.clone()
    rows[3, 0] = float("nan")
    with pytest.raises(EmbeddingError, match="embedding 3 holds NaN"):
        infonce(rows, LABELS)
