"""The one bound of the suite that is not zero: noise far below it, faults far above, both measured again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree, sharding
from oracle import reference
from oracle.case import Case
from oracle.exact import plain
from oracle.laws import LAWS
from oracle.laws.agreement import warmed
from oracle.laws.sharding import distances
from oracle.models import tiny
from oracle.outcome import Outcome
from oracle.ranks import over_mesh
from oracle.tolerances import STREAMING
from tests.drawing import drawn
from tests.faults.shards import GradientOverShards, LastBlockForgotten, RunningMaximumForgotten

LAW = next(law for law in LAWS if law.surfaces == ("streaming_step",))


class FirstKeyDropped(PaddingFree):
    """A sequence's first token is seen by itself alone."""

    def streaming_step(self, model: PreTrainedModel, case: Any, groups: Any) -> SimpleNamespace:
        right = sharding.Plan.pieces

        def pieces(plan: sharding.Plan, mine: int, source: int, *rest: Any) -> Any:
            (_, query), (_, key) = plan.on_ring[mine], plan.on_ring[source]
            first = (key == 0)[None, :] & (query > 0)[:, None]
            return [(rows, cols, hid | first[rows, cols]) for rows, cols, hid in right(plan, mine, source, *rest)]

        with mock.patch.object(sharding.Plan, "pieces", pieces):
            return super().streaming_step(model, case, groups)


class KeysTravelInFloat32(PaddingFree):
    """Keys and values go round the ring in float32."""

    def streaming_step(self, model: PreTrainedModel, case: Any, groups: Any) -> SimpleNamespace:
        right = sharding.Processes.shift

        def shift(wire: Any, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
            return right(wire, [_rounded(x) for x in sent], shapes)

        with mock.patch.object(sharding.Processes, "shift", shift):
            return super().streaming_step(model, case, groups)


def _rounded(x: Tensor) -> Tensor:
    """To float32's 24 bits; a cast would stay in float64 here."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**24).round(), exponent - 24)


FAULTS = [RunningMaximumForgotten, LastBlockForgotten, FirstKeyDropped, GradientOverShards, KeysTravelInFloat32]


def farthest(implementation: PaddingFree, case: Case) -> float:
    case = warmed(case)
    with plain():
        expected = reference.step(tiny(case.model, case.seed), case, case.rows)
    results = over_mesh(implementation, case, "streaming_step", exactly=False)
    found = [Outcome(result.embeddings, result.loss, result.gradients) for result in results]
    return max(size for outcome in found for _, _, size in distances(expected, outcome))


def test_noise_is_far_below_the_bound() -> None:
    noise = max(farthest(PaddingFree(), case) for case in drawn(LAW.strategy("qwen3"), 20, of=1))
    assert noise <= 4 * STREAMING.noise, f"noise has grown to {noise:.3g}"
    assert noise * 100 < STREAMING.bound


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_far_above_the_bound(fault: type[PaddingFree]) -> None:
    effects = [farthest(fault(), case) for case in drawn(LAW.strategy("qwen3"), 12, of=1)]
    seen = [effect for effect in effects if effect > 4 * STREAMING.noise]
    assert seen, "the fault showed nowhere"
    assert min(seen) >= STREAMING.fault, f"the smallest effect is {min(seen):.3g}"
    assert STREAMING.bound * 100 < min(seen)
