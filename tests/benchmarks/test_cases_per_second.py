"""How many exact cases a second: reference and implementation, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from impl import PaddingFree
from oracle import exact, reference
from oracle.case import Case
from oracle.models import tiny
from oracle.strategies import cases

benchmark_only = pytest.mark.skipif(
    "not config.getoption('--benchmark-only')", reason="timed only with --benchmark-only"
)


def drawn(count: int) -> list[Case]:
    found: list[Case] = []

    @seed(3)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(contrast=True))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@benchmark_only
@pytest.mark.parametrize("mode", ["exact", "plain"])
@pytest.mark.parametrize("side", ["reference", "implementation"])
def test_training_steps(benchmark: Any, side: str, mode: str) -> None:
    """One round is 20 drawn cases; plain float64 pads on the right only, where eager attention gives no NaN."""
    batch = drawn(20)

    def run() -> None:
        for case in batch:
            model = tiny(case.model, case.seed)
            if side == "implementation":
                PaddingFree().step(model, case)
            else:
                reference.step(model, case, case.rows if mode == "exact" else type(case.rows)())

    def timed() -> None:
        if mode == "exact":
            with exact():
                run()
        else:
            run()

    benchmark.pedantic(timed, rounds=5, warmup_rounds=1)
