"""InfoNCE by definition, against worked values, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from oracle.case import Options
from oracle.losses import LossInputError, group_rows, infonce, loss, qwen3, with_hard_negatives
from tests.worked import LABELS, PAIRS, ROWS, pairs

WORKED = [
    (Options(temperature=0.1), 2.142971),
    (Options(temperature=0.01), 20.0),
    (Options(temperature=1.0), 1.249748),
    (Options(temperature=1.0, use_batch=False), 0.371101),
    (Options(temperature=1.0, include_qq=True), 1.370874),
    (Options(temperature=1.0, include_dd=True), 1.868983),
    (Options(temperature=1.0, include_qq=True, include_dd=True), 1.936009),
    (Options(temperature=1.0, mask_fake_negative=True), 0.818925),
    (Options(temperature=1.0, mask_fake_negative=True, fake_negative_margin=0.2), 1.249748),
    (Options(temperature=1.0, mask_fake_negative=True, include_qq=True, include_dd=True), 1.742154),
    (Options(temperature=1.0, hard_negatives=1), 1.249748),
]


@pytest.mark.parametrize("options_expected", WORKED, ids=lambda pair: str(pair[1]))
def test_worked_values(options_expected: tuple[Options, float]) -> None:
    options, expected = options_expected
    assert loss(ROWS, LABELS, options).item() == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(("name", "labels", "distances", "expected"), PAIRS)
def test_worked_values_of_pairs(name: str, labels: list[float], distances: list[float], expected: float) -> None:
    assert loss(pairs(distances), labels, Options(loss=name)).item() == pytest.approx(expected, abs=1e-12)


def test_ms_swifts_labels_example_is_refused_where_it_went_on() -> None:
    """8 rows for three groups of anchor, positive, negative: ms-swift gives 2.3333."""
    with pytest.raises(LossInputError, match=r"8 embeddings do not fit 6 labels in 3 groups.*needs 9"):
        loss(torch.ones(8, 2, dtype=torch.float64), [1, 0, 1, 0, 1, 0], Options())


def test_the_papers_formula_by_hand() -> None:
    """Two groups: own negative, the other anchor, the other's documents against anchor and positive."""
    q1, p1, n1, q2, p2, n2 = ROWS
    limit = float(q1 @ p1) + 0.1
    candidates = [q1 @ p1, q1 @ n1, q1 @ q2]
    for document in (p2, n2):
        if float(q1 @ document) <= limit:
            candidates += [q1 @ document, p1 @ document]
    first = -math.log(math.exp(q1 @ p1) / sum(math.exp(c) for c in candidates))
    candidates = [q2 @ p2, q2 @ n2, q2 @ q1]
    for document in (p1, n1):
        if float(q2 @ document) <= float(q2 @ p2) + 0.1:
            candidates += [q2 @ document, p2 @ document]
    second = -math.log(math.exp(q2 @ p2) / sum(math.exp(c) for c in candidates))
    found = loss(ROWS, LABELS, Options(loss="qwen3", temperature=1.0)).item()
    assert found == pytest.approx((first + second) / 2)
    # n1 is the text of p2: known to be, it is no negative of group 1's anchor.
    assert qwen3(ROWS, LABELS, Options(temperature=1.0), [0, 1, 2, 3, 1, 5]).item() != pytest.approx(found)


def test_equal_texts_are_left_out_by_identity_alone() -> None:
    rows = ROWS.clone()
    rows[2] = rows[1]
    twice = qwen3(rows[:3], [1.0, 0.0], Options(temperature=1.0))
    once = qwen3(rows[:3], [1.0, 0.0], Options(temperature=1.0), ["q", "p", "p"])
    assert twice.item() == pytest.approx(math.log(2))
    assert once.item() == 0


def test_hard_negatives_are_the_first_or_drawn_again_never_the_positive() -> None:
    groups = [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert with_hard_negatives(groups, Options(hard_negatives=2))[0] == [0, 1, 2, 3]
    for seed in range(20):
        kept, filled = with_hard_negatives(groups, Options(hard_negatives=3, resample_seed=seed))
        assert kept == [0, 1, 2, 3, 4]
        assert filled == [5, 6, 7, 7, 7]
    drawn = {
        tuple(with_hard_negatives([[0, 1, 2, 3]], Options(hard_negatives=4, resample_seed=s))[0][4:]) for s in range(40)
    }
    assert drawn == {(2, 2), (2, 3), (3, 2), (3, 3)}, "every negative can come, the last one too"
    with pytest.raises(LossInputError, match="group 1 has no negative where 2 hard negatives are asked for"):
        with_hard_negatives([[0, 1, 2], [3, 4]], Options(hard_negatives=2))


def test_matryoshka_is_the_weighted_sum_of_renormalised_prefixes() -> None:
    rows = torch.cat([ROWS, ROWS.flip(1) / 2], dim=1)
    whole = torch.nn.functional.normalize(rows, dim=1)
    expected = 0.25 * infonce(ROWS, LABELS, Options()) + 2 * infonce(whole, LABELS, Options())
    assert loss(rows, LABELS, Options(matryoshka=((2, 0.25), (4, 2.0)))).item() == pytest.approx(expected.item())
    with pytest.raises(LossInputError, match="matryoshka asks for 5 dimensions of 4"):
        loss(rows, LABELS, Options(matryoshka=((5, 1.0),)))


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
        ([], 0, "^no labels: a loss needs at least one group$"),
        ([0, 1], 3, "^label 0 is 0: the first group has no positive$"),
        ([1, 0, 1, 0], 5, "5 embeddings do not fit 4 labels in 2 groups.*needs 6.*Group 1 is the first without"),
        ([1, 0, 1, 0], 2, "Group 0 is the first without all its rows: it would end at row 2"),
        ([1, 0, 1, 0], 3, "Group 1 is the first without all its rows: it would end at row 5"),
        ([1, 0, 1, 0], 4, "Group 1 is the first without all its rows: it would end at row 5"),
        ([1, 0, 1, 0], 8, "Row 6 belongs to no group"),
        ([1, 0, 1, 0], 7, "Row 6 belongs to no group"),
        ([1.0, *[0.0] * 256] * 2, 260, "260 embeddings do not fit 514 labels in 2 groups.*needs 516"),
    ],
)
def test_labels_and_rows_that_do_not_fit_are_refused(labels: list[float], rows: int, message: str) -> None:
    with pytest.raises(LossInputError, match=message):
        infonce(torch.zeros(rows, 2, dtype=torch.float64), labels, Options())


@pytest.mark.parametrize("row", [4, 5])
@pytest.mark.parametrize(("value", "message"), [(float("nan"), "holds NaN"), (0.0, "is zero: it has no direction")])
def test_rows_without_a_direction_are_refused_by_row_and_group(value: float, message: str, row: int) -> None:
    rows = ROWS.clone()
    rows[row] = value
    with pytest.raises(LossInputError, match=f"embedding {row} of group 1 {message}"):
        infonce(rows, LABELS, Options())
    with pytest.raises(LossInputError, match=f"embedding {row} of group 2 {message}"):
        loss(rows, [1, 0, 1], Options(loss="contrastive"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "^no labels: a loss needs at least one pair$"),
        ([1, 0], "6 embeddings do not fit 2 pairs, which need 4"),
        ([1, 0, 0.5], "pair 2 has the label 0.5"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(labels: list[float], message: str) -> None:
    with pytest.raises(LossInputError, match=message):
        loss(pairs([0.2, 0.2, 2]), labels, Options(loss="online_contrastive"))
