"""How near the limit ours is, and who else is: ratios of one interleaved run, never absolute times.

The limit: the model's dense layers on the real tokens alone, plus attention's own arithmetic on tensors that lie ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracle.exact import exact
from tests.benchmarks.contenders import (
    CONTENDERS,
    GPU_ONLY,
    Contender,
    Sequences,
    attention_alone,
    dense_alone,
    left_out,
    ours,
)
from tests.benchmarks.interleaved import Times, interleaved
from tests.benchmarks.workloads import WORKLOADS, founding, log_normal, qwen3, sequences

benchmark_only = pytest.mark.skipif("not config.getoption('--benchmark-only')", reason="only with --benchmark-only")

# The most that ours may take, in limits: founding batch; ragged; uniform; eight founding batches.
AT_MOST = {"W1": 1.35, "W2": 1.5, "W3": 1.5, "W4": 1.35}
# Others' time over ours below which ours is no longer the fastest; the rest is a busy machine's noise, for where
# hardly two sequences are of one length, several ways are the same.
NOISE = 0.9

DENSE, ATTENTION = "dense layers alone", "attention alone"

Run = Callable[[], object]


def step(contender: Contender, batch: Sequences, dtype: torch.dtype, device: str, backward: bool) -> Run:
    """One forward pass, or forward and backward with a gradient for every embedding."""
    model = qwen3(dtype, device)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            found = contender(model, batch)
            if backward:
                model.zero_grad()
                (found * found.detach().roll(1, 0)).sum().backward()

    return run


def measured(names: list[str], batch: Sequences, rounds: int, dtype: torch.dtype, device: str, backward: bool) -> Times:
    """The named contenders and the limit, interleaved."""
    runs = {DENSE: step(dense_alone, batch, dtype, device, backward)}
    runs[ATTENTION] = attention_alone(qwen3(dtype, device), batch, backward)
    runs |= {name: step(CONTENDERS[name], batch, dtype, device, backward) for name in names}
    return interleaved(runs, rounds, device)


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in ("ours", *GPU_ONLY)])
def test_every_contender_computes_the_same_embeddings(name: str) -> None:
    """A race against something that computes something else proves nothing."""
    batch, model = sequences([3, 1, 1, 7, 2, 1, 16, 5, 1]), qwen3(torch.float64)
    with torch.no_grad(), exact():
        expected = ours(model, batch)
        found = CONTENDERS[name](model, batch)
    assert torch.equal(found, expected)


@benchmark_only
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward-backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_ours_is_near_the_limit_and_the_fastest(
    benchmark: Any, workload: str, dtype: torch.dtype, backward: bool, full: bool, device: str
) -> None:
    if not full and (workload != "W1" or dtype == torch.bfloat16):
        pytest.skip("minutes long: --full")
    slow = device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.bfloat16 and workload != "W1" and slow:
        pytest.skip("this CPU has no bfloat16 products: ten times slower than float32")
    batch = sequences(WORKLOADS[workload]())
    without = {name: why for name in CONTENDERS if (why := left_out(name, batch, device))}
    names = [name for name in CONTENDERS if name not in without and (full or not name.startswith("padded"))]
    rounds = 15 if full and workload == "W1" and dtype == torch.float32 else 3
    times = benchmark.pedantic(measured, (names, batch, rounds, dtype, device, backward), rounds=1)
    limits = {name: times.ratio(name, DENSE, ATTENTION) for name in names}
    benchmark.extra_info |= {
        "workload": workload,
        "sequences": len(batch),
        "tokens": sum(map(len, batch)),
        "dtype": str(dtype),
        "backward": backward,
        "seconds": {name: times.median(name) for name in times.seconds},
        "limits": limits,
        "dense": {name: times.ratio(name, DENSE) for name in names},
        "peak": times.peak,
        "left out": without,
    }
    assert limits["ours"] <= AT_MOST[workload], limits
    faster = {name: times.ratio(name, "ours") for name in names if times.ratio(name, "ours") < NOISE}
    assert not faster, f"faster than ours, in times of ours: {faster}"


@benchmark_only
def test_raggedness_costs_ours_nothing(benchmark: Any, full: bool, device: str) -> None:
    """The more uneven the lengths, the more a padded batch wastes; ours stays where it is."""
    if not full:
        pytest.skip("minutes long: --full")
    names = ["ours", "padded", "padded, 64 sorted pieces", "transformers packed", "one SDPA call a sequence"]
    batches = {
        str(spread): sequences(log_normal(128, 16, 256, spread=spread)) for spread in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
    }

    def run() -> dict[str, Times]:
        return {spread: measured(names, batch, 3, torch.float32, device, True) for spread, batch in batches.items()}

    times = benchmark.pedantic(run, rounds=1)
    limits = {spread: {name: each.ratio(name, DENSE, ATTENTION) for name in names} for spread, each in times.items()}
    benchmark.extra_info["raggedness"] = limits
    assert all(found["ours"] <= AT_MOST["W2"] for found in limits.values()), limits


@benchmark_only
def test_a_token_costs_the_same_in_64_sequences_and_in_4096(benchmark: Any, full: bool, device: str) -> None:
    counts = (64, 516, 4096) if full else (64, 516, 1032)
    batches = {count: sequences(founding(8)[:count]) for count in counts}
    runs = {str(count): step(ours, batch, torch.float32, device, True) for count, batch in batches.items()}
    times = benchmark.pedantic(interleaved, (runs, 5, device), rounds=1)
    micros = {count: times.median(str(count)) / sum(map(len, batch)) * 1e6 for count, batch in batches.items()}
    benchmark.extra_info["microseconds a token"] = micros
    assert micros[counts[-1]] <= 1.15 * micros[counts[1]], micros
    assert micros[counts[-1]] <= 1.15 * micros[counts[0]], micros
