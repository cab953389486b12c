"""Peak memory of the loss, whole and in chunks, as the batch grows; forward and backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
benchmark_only = pytest.mark.skipif("not config.getoption('--benchmark-only')", reason="only with --benchmark-only")

SCRIPT = """
import json, resource, sys, time, torch
from impl.losses import InfoNCE
groups, rows, width, chunk = (int(x) for x in sys.argv[1:])
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
embeddings = torch.nn.functional.normalize(torch.randn(groups * rows, width, generator=generator)).requires_grad_()
labels = [1.0, *[0.0] * (rows - 2)] * groups
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
loss = InfoNCE(chunk=chunk or None)(embeddings, labels)
loss.backward()
print(json.dumps({"mib": peak() - before, "s": time.perf_counter() - start, "loss": loss.item()}))
"""


def measure(groups: int, rows: int = 9, width: int = 1024, chunk: int = 0) -> dict[str, Any]:
    """A fresh process: MiB beyond the embeddings, seconds, the loss."""
    # Without the threshold glibc keeps freed blocks for itself, and the peak is its own.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", SCRIPT, *map(str, (groups, rows, width, chunk))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@benchmark_only
@pytest.mark.parametrize("chunk", [0, 64], ids=["whole", "chunk-64"])
@pytest.mark.parametrize("groups", [1024, 2048, 4096])
def test_peak_memory(benchmark: Any, groups: int, chunk: int) -> None:
    result = benchmark.pedantic(measure, args=(groups,), kwargs={"chunk": chunk}, rounds=1)
    benchmark.extra_info.update(result)


@benchmark_only
def test_chunked_memory_grows_linearly_where_the_whole_grows_with_the_square(benchmark: Any) -> None:
    """Four times the groups: at most five times the memory in chunks, more than eight as a whole (narrow rows)."""

    def ratios() -> tuple[float, float]:
        few = {chunk: measure(1024, 5, 64, chunk)["mib"] for chunk in (0, 64)}
        many = {chunk: measure(4096, 5, 64, chunk)["mib"] for chunk in (0, 64)}
        return many[0] / few[0], many[64] / few[64]

    whole, chunked = benchmark.pedantic(ratios, rounds=1)
    benchmark.extra_info.update(whole=whole, chunked=chunked)
    assert chunked <= 5, (whole, chunked)
    assert whole >= 8, (whole, chunked)
