"""How many exact cases a second, reference and implementation; how many simulated layouts of shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from impl import PaddingFree
from impl.sharding import Plan, Simulated, sharded_attention
from oracle import exact, reference
from oracle.laws.sharding import SIMULATED
from oracle.models import tiny
from oracle.strategies import cases, mesh_cases
from tests.drawing import drawn

benchmark_only = pytest.mark.skipif(
    "not config.getoption('--benchmark-only')", reason="timed only with --benchmark-only"
)


@benchmark_only
@pytest.mark.parametrize("mode", ["exact", "plain"])
@pytest.mark.parametrize("side", ["reference", "implementation"])
def test_training_steps(benchmark: Any, side: str, mode: str) -> None:
    """One round is 20 drawn cases; plain float64 pads on the right only, where eager attention gives no NaN."""
    batch = drawn(cases(contrast=True), 20, of=3)

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


@benchmark_only
@pytest.mark.parametrize("what", ["maps", "one round", "three rounds"])
def test_simulated_layouts(benchmark: Any, what: str) -> None:
    """One round is 200 drawn layouts: index maps there and back, or those and attention over them, forward."""
    cases_ = drawn(mesh_cases(SIMULATED, model_matters=False), 200, of=3)
    layouts = [(tuple(case.lengths), case.mesh) for case in cases_]

    def maps() -> None:
        for lengths, mesh in layouts:
            plan, tags = Plan(lengths, mesh.ulysses, mesh.ring), torch.arange(sum(lengths))
            assert torch.equal(plan.gather(plan.split(tags)), tags)

    def attention() -> None:
        for lengths, mesh in layouts:
            wire = Simulated(Plan(lengths, mesh.ulysses, mesh.ring))
            q = torch.zeros(sum(lengths), mesh.ulysses, 4)
            shares = [(q[held], q[held], q[held]) for held in wire.plan.tokens]
            wire.plan.collected(sharded_attention(wire, shares, (-1, 0), 1.0, what == "one round"))

    benchmark.pedantic(maps if what == "maps" else attention, rounds=3, warmup_rounds=1)
    benchmark.extra_info["layouts a second"] = len(layouts) / benchmark.stats.stats.median
