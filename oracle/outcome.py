"""Outcomes, and the exact comparison of two of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What a training step computed.

    embeddings: [n, d]. loss: scalar. gradients: by parameter name (absent: no gradient).
    input_gradients: one [length, d] for each sequence, the gradient of its input embeddings; None where
    an implementation does not offer it.
    """

    embeddings: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    input_gradients: list[Tensor] | None = None

    def digest(self) -> str:
        """SHA-256 over every bit, with -0.0 as 0.0."""
        sha = hashlib.sha256()
        parts = [("embeddings", self.embeddings), ("loss", self.loss), *sorted(self.gradients.items())]
        parts += [(f"input {i}", g) for i, g in enumerate(self.input_gradients or [])]
        for name, tensor in parts:
            sha.update(name.encode())
            sha.update((tensor.detach().double() + 0.0).cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()


@dataclass(frozen=True)
class Difference:
    """Where two outcomes differ first, and by how much.

    what: "embeddings", "loss", "gradient of NAME" or "input gradient". sequence: index in row order,
    where one can be named. size: greatest absolute difference (inf for NaN or a shape that differs).
    """

    what: str
    detail: str
    sequence: int | None = None
    size: float = math.inf

    def __str__(self) -> str:
        place = "" if self.sequence is None else f" at sequence {self.sequence}"
        return f"{self.what}{place}: {self.detail}"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit but the sign of zero; NaN equals nothing."""
    return a.shape == b.shape and bool(torch.equal(a.double(), b.double()))


def gap(a: Tensor, b: Tensor) -> float:
    """Greatest absolute difference; inf for NaN or another shape. In numpy, which the exact mode does not round."""
    if a.shape != b.shape:
        return math.inf
    left, right = (x.detach().double().cpu().numpy() for x in (a, b))
    return float(np.nan_to_num(np.abs(left - right), nan=np.inf, posinf=np.inf).max())


def compare_embeddings(expected: Tensor, found: Tensor) -> Difference | None:
    """Count, width, then sequence by sequence."""
    if len(expected) != len(found):
        return Difference("embeddings", f"{len(expected)} sequences gave {len(found)} embeddings")
    if expected.shape != found.shape:
        return Difference("embeddings", f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not same(a, b):
            wrong = sum(not same(x, y) for x, y in zip(expected, found, strict=True))
            detail = f"{_differs(a, b)}; {wrong} of {len(expected)} sequences differ"
            return Difference("embeddings", detail + _stolen(expected, b), i, gap(a, b))
    return None


def _stolen(expected: Tensor, found: Tensor) -> str:
    for j, other in enumerate(expected):
        if same(other, found):
            return f"; it equals what sequence {j} should have"
    return ""


def gradient_pairs(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Parameter by parameter, its name and both gradients; one that is missing is zero."""
    for name in sorted(expected.keys() | found.keys()):
        a, b = expected.get(name), found.get(name)
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None
        assert b is not None
        yield name, a, b


def compare_gradients(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Difference | None:
    """Parameter by parameter; a missing gradient counts as different unless it should be zero."""
    for name, a, b in gradient_pairs(expected, found):
        if not same(a, b):
            wrong = sum(1 for n in expected if n not in found or not same(expected[n], found[n]))
            return Difference(
                f"gradient of {name}", f"{_differs(a, b)}; {wrong} of {len(expected)} gradients differ", None, gap(a, b)
            )
    return None


def compare_inputs(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Difference | None:
    """Sequence by sequence."""
    if len(expected) != len(found):
        return Difference("input gradient", f"{len(found)} sequences, expected {len(expected)}")
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not same(a, b):
            return Difference("input gradient", _differs(a, b), i, gap(a, b))
    return None


def compare(expected: Outcome, found: Outcome) -> Difference | None:
    """The first difference: embeddings by sequence, gradients, inputs' gradients, the loss last.

    The loss comes last because it hides most: faults that move an embedding by 0.5 may move it by 0.
    """
    difference = compare_embeddings(expected.embeddings, found.embeddings)
    difference = difference or compare_gradients(expected.gradients, found.gradients)
    if difference is None and expected.input_gradients is not None and found.input_gradients is not None:
        difference = compare_inputs(expected.input_gradients, found.input_gradients)
    if difference is None and not same(expected.loss, found.loss):
        size = gap(expected.loss, found.loss)
        difference = Difference("loss", _differs(expected.loss, found.loss), None, size)
    return difference


def _differs(expected: Tensor, found: Tensor) -> str:
    if expected.shape != found.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    apart = expected.double() != found.double()
    at = tuple(apart.nonzero()[0].tolist())
    size = "NaN" if bool(found.isnan().any()) else f"{gap(expected, found):.3g}"
    return (
        f"greatest difference {size}, first at {list(at)}: expected {expected[at].item():.17g}, "
        f"found {found[at].item():.17g}{_multiple(expected.double(), found.double())}"
    )


FACTORS = {2: "twice", 4: "four times", 0.5: "half", 0.25: "a quarter of", -1: "the negative of"}


def _multiple(expected: Tensor, found: Tensor) -> str:
    """Where everything is wrong by one factor, which it is: a rank counted twice, or not at all."""
    a, b = (x.detach().cpu().numpy() for x in (expected, found))
    for factor, told in FACTORS.items():
        if a.size > 1 and np.abs(b - factor * a).max() <= 1e-3 * np.abs(factor * a).max():
            return f"; it is {told} what it should be"
    return ""
