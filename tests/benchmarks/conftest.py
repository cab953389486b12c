"""What a record says of the machine it was made on."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

FIELDS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total"


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Versions, threads, and the GPU with its driver and clocks."""
    machine_info["node"] = ""  # whose machine it was is nobody's business
    machine_info |= {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": config.getoption("--device"),
        "gpu": _gpu(),
    }


def _gpu() -> dict[str, str] | None:
    if not torch.cuda.is_available():
        return None
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    found = dict(zip(FIELDS.split(","), (value.strip() for value in told.split(",")), strict=True))
    return found | {"cuda": str(torch.version.cuda)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The plain forms of a large batch take minutes."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_benchmark_generate_json(benchmarks: list[Any]) -> Generator[None, dict[str, Any], dict[str, Any]]:
    """A benchmark that was broken off has no times; the record of the others must not be lost with it."""
    benchmarks[:] = [each for each in benchmarks if each.stats.data]
    return (yield)
