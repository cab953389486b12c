"""Outcomes: when two are the same, and what is said where they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.outcome import (
    Difference,
    Outcome,
    compare,
    compare_embeddings,
    compare_gradients,
    compare_inputs,
    gap,
    gradient_pairs,
    same,
)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


NAN = float("nan")
OUTCOME = Outcome(
    torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64),
    torch.tensor(5.0, dtype=torch.float64),
    {"a": tensor(1, 2), "b": tensor(3)},
    [tensor(1, 2), tensor(3, 4, 5)],
)


def test_the_sign_of_zero_is_no_difference_and_nan_always_is() -> None:
    assert same(tensor(0.0, 1.0), tensor(-0.0, 1.0))
    assert same(torch.tensor([1.5], dtype=torch.float32), tensor(1.5))
    assert not same(tensor(1.0), tensor(1.0, 1.0))
    assert not same(tensor(NAN), tensor(NAN))


def test_the_gap_is_the_greatest_difference() -> None:
    assert gap(tensor(1, 5, 2), tensor(1.5, 2, 2)) == 3
    assert gap(tensor(1), tensor(1, 1)) == float("inf")
    assert gap(tensor(1, 2), tensor(NAN, 2)) == float("inf")
    assert gap(tensor(1, 2), tensor(float("inf"), 2)) == float("inf")
    assert gap(tensor(1, 2).requires_grad_(), tensor(1, 2)) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"embeddings": OUTCOME.embeddings * 2},
        {"loss": OUTCOME.loss + 1},
        {"gradients": {"a": tensor(1, 2), "b": tensor(4)}},
        {"gradients": {"a": tensor(1, 2), "c": tensor(3)}},
        {"input_gradients": None},
        {"input_gradients": [tensor(1, 2), tensor(3, 4, 6)]},
        {"input_gradients": [tensor(1, 2, 3), tensor(4, 5)]},
    ],
)
def test_a_digest_tells_outcomes_apart(changed: dict[str, object]) -> None:
    assert replace(OUTCOME, **changed).digest() != OUTCOME.digest()  # type: ignore[arg-type]


def test_a_digest_knows_neither_the_order_of_names_nor_the_sign_of_zero() -> None:
    shuffled = replace(OUTCOME, gradients=dict(reversed(OUTCOME.gradients.items())))
    assert shuffled.digest() == OUTCOME.digest()
    zeros = replace(OUTCOME, loss=torch.tensor(0.0, dtype=torch.float64))
    assert replace(zeros, loss=-zeros.loss).digest() == zeros.digest()


def test_a_digest_is_the_same_for_ever() -> None:
    """Golden files and other machines compare with it."""
    assert OUTCOME.digest() == "5b4a11f661706ce306a0fd8ac905c5d6675c8707069c22c21b7fec751eec65a2"


E0 = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("found", "sequence", "size", "text"),
    [
        (E0[:2], None, float("inf"), "embeddings: 3 sequences gave 2 embeddings"),
        (E0[:, :1], None, float("inf"), "embeddings: shape (3, 1), expected (3, 2)"),
        (
            E0 + tensor(0, 0.5) * torch.tensor([[0], [1], [1]]),
            1,
            0.5,
            "embeddings at sequence 1: greatest difference 0.5, first at [1]: expected 4, found 4.5; 2 of 3 sequences "
            "differ",
        ),
        (
            E0[[0, 2, 1]],
            1,
            2.0,
            "embeddings at sequence 1: greatest difference 2, first at [0]: expected 3, found 5; 2 of 3 sequences "
            "differ; it equals what sequence 2 should have",
        ),
        (
            E0[[1, 1, 2]],
            0,
            2.0,
            "embeddings at sequence 0: greatest difference 2, first at [0]: expected 1, found 3; 1 of 3 sequences "
            "differ; it equals what sequence 1 should have",
        ),
        (
            torch.where(E0 == 4, NAN, E0),
            1,
            float("inf"),
            "embeddings at sequence 1: greatest difference NaN, first at [1]: expected 4, found nan; 1 of 3 sequences "
            "differ",
        ),
    ],
)
def test_embeddings_are_compared_sequence_by_sequence(
    found: Tensor, sequence: int | None, size: float, text: str
) -> None:
    difference = compare_embeddings(E0, found)
    assert difference is not None
    assert (difference.what, difference.sequence, difference.size) == ("embeddings", sequence, size)
    assert str(difference) == text


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (2, "; it is twice what it should be"),
        (4, "; it is four times what it should be"),
        (0.5, "; it is half what it should be"),
        (0.25, "; it is a quarter of what it should be"),
        (-1, "; it is the negative of what it should be"),
        (3, ""),
        (2.003, ""),
        (2.001, "; it is twice what it should be"),
    ],
)
def test_a_wrong_factor_is_named(factor: float, told: str) -> None:
    expected = {"w": tensor(4, 5)}
    difference = compare_gradients(expected, {"w": tensor(4, 5) * factor})
    assert difference is not None
    value, size = 4 * factor, f"{5 * abs(factor - 1):.3g}"
    assert str(difference) == (
        f"gradient of w: greatest difference {size}, first at [0]: expected 4, found {value:.17g}{told}; "
        "1 of 1 gradients differ"
    )


def test_one_number_alone_has_no_factor() -> None:
    assert "twice" not in str(compare_gradients({"w": tensor(4)}, {"w": tensor(8)}))
    assert "twice" in str(compare_gradients({"w": tensor(4, 0)}, {"w": tensor(8, 0)}))
    assert "twice" not in str(compare_gradients({"w": tensor(4, 1)}, {"w": tensor(8, 3)}))


def test_a_missing_gradient_is_zero() -> None:
    assert compare_gradients({"a": tensor(0, 0)}, {"b": tensor(0)}) is None
    lacking = compare_gradients({"a": tensor(1), "b": tensor(2), "c": tensor(3)}, {"a": tensor(1), "b": tensor(4)})
    assert str(lacking) == (
        "gradient of b: greatest difference 2, first at [0]: expected 2, found 4; 2 of 3 gradients differ"
    )
    extra = compare_gradients({"a": tensor(1)}, {"a": tensor(1), "x": tensor(0, 7)})
    assert extra == Difference(
        "gradient of x", "greatest difference 7, first at [1]: expected 0, found 7; 0 of 1 gradients differ", None, 7.0
    )
    assert [name for name, _, _ in gradient_pairs({"b": tensor(1), "a": tensor(1)}, {"c": tensor(1)})] == list("abc")


def test_inputs_are_compared_sequence_by_sequence() -> None:
    own = [tensor(1), tensor(2, 3)]
    assert compare_inputs(own, own) is None
    assert str(compare_inputs(own, own[:1])) == "input gradient: 1 sequences, expected 2"
    assert compare_inputs(own, [tensor(1), tensor(2, 5)]) == Difference(
        "input gradient", "greatest difference 2, first at [1]: expected 3, found 5", 1, 2.0
    )
    assert "shape (1,), expected (2,)" in str(compare_inputs(own, [tensor(1), tensor(2)]))


def test_the_loss_comes_last() -> None:
    assert compare(OUTCOME, OUTCOME) is None
    assert compare(OUTCOME, replace(OUTCOME, input_gradients=None)) is None
    assert compare(replace(OUTCOME, input_gradients=None), OUTCOME) is None
    found = replace(OUTCOME, loss=OUTCOME.loss + 2)
    assert compare(OUTCOME, found) == Difference(
        "loss", "greatest difference 2, first at []: expected 5, found 7", None, 2.0
    )
    found = replace(found, input_gradients=[tensor(1, 2), tensor(3, 4, 6)])
    assert str(compare(OUTCOME, found)).startswith("input gradient at sequence 1")
    found = replace(found, gradients={"a": tensor(1, 3), "b": tensor(3)})
    assert str(compare(OUTCOME, found)).startswith("gradient of a")
    found = replace(found, embeddings=OUTCOME.embeddings + 1)
    assert str(compare(OUTCOME, found)).startswith("embeddings at sequence 0")
