"""How other projects check padded against padding-free, written as comparators, and run on the same faults.

Each style sees the right padded side and the fault, in float32 where no style says otherwise, on as many tokens as
one run of our suite draws; it knows no options and no exact arithmetic. It is not told where to look either.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree
from oracle import losses, reference
from oracle.case import Case, Rows, from_lengths
from oracle.models import VOCABULARY, kind, tiny
from tests.faults.base import finished
from tests.faults.catalogue import Fault
from tests.faults.trial import cases, changed, schedule

LOSS = 1.5e-2
BF16 = 2.0**-7


@dataclass(frozen=True)
class Style:
    """name: as published. lengths: of one batch's groups. agrees: whether it is content with one batch."""

    name: str
    lengths: Callable[[random.Random], list[list[int]]]
    agrees: Callable[[Any, PreTrainedModel, Case], bool]
    batches: int | None = None


@dataclass(frozen=True)
class _Step:
    embeddings: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


@cache
def model_of(name: str) -> PreTrainedModel:
    """The tiny model in float32."""
    return copy.deepcopy(tiny(name)).float()


def _padded(model: PreTrainedModel, case: Case) -> Tensor:
    return reference.encode(model, case.sequences, Rows(), "last", kind(case.model).first_position)


def _padded_step(model: PreTrainedModel, case: Case) -> _Step:
    embeddings = _padded(model, case)
    made = finished(model, embeddings, losses.infonce(embeddings, case.labels, case.options))
    return _Step(made.embeddings, made.loss, made.gradients)


def _encoded(implementation: Any, model: PreTrainedModel, case: Case) -> Tensor:
    found: Tensor = implementation.encode(model, case.sequences, case.stream, "last")
    return found


def _close(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    if a.shape != b.shape:
        return False
    given = {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
    try:
        torch.testing.assert_close(b, a, **given)
    except AssertionError:
        return False
    return True


def masked_mean(implementation: Any, model: PreTrainedModel, case: Case) -> bool:
    """The means of both outputs over all real entries are within 1e-2."""
    with torch.no_grad():
        return bool((_padded(model, case).mean() - _encoded(implementation, model, case).mean()).abs() <= 1e-2)


def cosine(implementation: Any, model: PreTrainedModel, case: Case) -> bool:
    """Every pair of vectors has a cosine above 0.999."""
    with torch.no_grad():
        found = _encoded(implementation, model, case)
        return bool((torch.cosine_similarity(_padded(model, case), found, dim=-1) > 0.999).all())


def bf16_eps(implementation: Any, model: PreTrainedModel, case: Case) -> bool:
    """Outputs are close by bfloat16's eps, forward only."""
    with torch.no_grad():
        return _close(_padded(model, case), _encoded(implementation, model, case), BF16)


def greatest(implementation: Any, model: PreTrainedModel, case: Case) -> bool:
    """The greatest difference is at most 1e-2."""
    with torch.no_grad():
        a, b = _padded(model, case), _encoded(implementation, model, case)
        return a.shape == b.shape and float((a - b).abs().max()) <= 1e-2


def allclose(implementation: Any, model: PreTrainedModel, case: Case) -> bool:
    """torch's default tolerances for float32, forward and gradients."""
    expected, made = _padded_step(model, case), implementation.step(model, case)
    if not _close(expected.embeddings, made.embeddings) or not _close(expected.loss, made.loss):
        return False
    names = expected.gradients.keys() | made.gradients.keys()
    zero = torch.zeros(1)
    return all(
        _close(*torch.broadcast_tensors(expected.gradients.get(name, zero), made.gradients.get(name, zero)))
        for name in names
    )


STEPS = 10


def trajectory(implementation: Any, model: PreTrainedModel, case: Case) -> bool:
    """Ten steps of training from the same weights: losses within 1.5e-2 of each other."""
    curves = []
    for step in (lambda m: _padded_step(m, case), lambda m: implementation.step(m, case)):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        curve = []
        for _ in range(STEPS):
            made = step(trained)
            curve.append(float(made.loss))
            for name, parameter in trained.named_parameters():
                parameter.grad = made.gradients.get(name)
            optimizer.step()
        curves.append(torch.tensor(curve))
    return bool(((curves[0] - curves[1]).abs() <= LOSS).all())


def _groups(draw: Callable[[], int], chance: random.Random) -> list[list[int]]:
    return [[draw() for _ in range(chance.randint(2, 4))] for _ in range(2)]


def _mixed(chance: random.Random) -> list[list[int]]:
    return _groups(lambda: chance.randint(1, 64), chance)


def _equal(chance: random.Random) -> list[list[int]]:
    length = chance.randint(2, 64)
    return _groups(lambda: length, chance)


def _multiples(chance: random.Random) -> list[list[int]]:
    return _groups(lambda: 64 * chance.randint(1, 2), chance)


def _fixed(chance: random.Random) -> list[list[int]]:
    return [[6, 9]]


STYLES = [
    Style("masked means within 1e-2", _mixed, masked_mean),
    Style("cosine above 0.999", _mixed, cosine),
    Style("outputs within bf16's eps, forward only", _mixed, bf16_eps),
    Style("equal lengths, allclose", _equal, allclose),
    Style("lengths that are multiples of 64, allclose", _multiples, allclose),
    Style("loss over ten steps within 1.5e-2", _mixed, trajectory),
    Style("greatest difference 1e-2 on two fixed sentences", _fixed, greatest, batches=1),
    Style("allclose, random lengths 1 to 64, forward and gradients", _mixed, allclose),
]


@cache
def budget() -> int:
    """Tokens of one run of our suite, in all laws that run a model."""
    laws = {law.title for law, _ in schedule() if law.family in ("isolation", "agreement", "slots")}
    return sum(sum(case.lengths) for title in laws for case in cases(title, "qwen3", 0))


def batches(style: Style, model: str, seed: int = 0) -> Iterator[Case]:
    """Batches by the style's recipe until so many tokens are spent."""
    chance, spent, made = random.Random(seed), 0, 0
    while spent < budget() and (style.batches is None or made < style.batches):
        lengths = style.lengths(chance)
        yield from_lengths(lengths, VOCABULARY, model=model, seed=made)
        cost = STEPS if style.agrees is trajectory else 1
        spent, made = spent + cost * sum(map(sum, lengths)), made + 1


def within_reach(fault: Fault) -> bool:
    """Whether a fault changes anything that these styles look at: an embedding, a loss or a step."""
    kinds = changed(fault.implementation)
    return bool(kinds & {"encode", "step", "loss"}) or not kinds


@cache
def quiet(style: Style, model: str) -> list[Case]:
    """The batches on which the style is content with the right implementation: on others it says nothing."""
    right = PaddingFree()
    return [case for case in batches(style, model) if style.agrees(right, model_of(model), case)]


def caught(style: Style, fault: Fault) -> bool:
    """Whether the style is discontent with a batch on which it is content with the right implementation.

    An implementation that raises is caught as well.
    """
    if not within_reach(fault):
        return False
    implementation, model = fault.implementation(), model_of(fault.model)
    own = quiet(style, fault.model)
    with fault.patch():
        for case in own:
            try:
                if not style.agrees(implementation, model, case):
                    return True
            except Exception:
                return True
    return False


def alarms(style: Style, model: str = "qwen3") -> int:
    """How many batches of the right implementation the style is discontent with."""
    return sum(1 for _ in batches(style, model)) - len(quiet(style, model))
