"""The same bits whatever the vector instructions and however many threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import hashlib, sys, torch
torch.set_num_threads(int(sys.argv[1]))
from oracle import exact, reference
from oracle.case import Rows, from_lengths
from oracle.models import tiny
sha = hashlib.sha256()
for mode, names in (("exact", ("qwen3", "gemma3", "modernbert")), ("plain", ("qwen3",))):
    for name in names:
        case, model = from_lengths([[3, 1, 9], [17, 1, 1, 40], [5, 5]], model=name), tiny(name)
        with exact() if mode == "exact" else torch.enable_grad():
            for outcome in (reference.step(model, case, Rows()), reference.step(model, case, None)):
                sha.update(outcome.digest().encode())
    print(mode, sha.hexdigest())
print("capability", torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
"""


def _capabilities() -> list[str]:
    """What this processor can be told to use."""
    known = ["DEFAULT", "AVX2", "AVX512"]
    best = torch.backends.cpu.get_cpu_capability()
    return [name.lower() for name in known[: known.index(best) + 1]] if best in known else ["default"]


def _run(capability: str, threads: int) -> tuple[str, int, dict[str, str]]:
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(threads)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return capability, threads, dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bits_do_not_depend_on_vector_instructions_or_threads() -> None:
    settings = [(capability, threads) for capability in _capabilities() for threads in (1, 2, 3)]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda setting: _run(*setting), settings))
    for capability, threads, printed in runs:
        assert printed["capability"].lower() == f"{capability} {threads}", "the setting did not take"
    assert len({printed["exact"] for _, _, printed in runs}) == 1, runs
    if len(_capabilities()) > 1:
        assert len({printed["plain"] for _, _, printed in runs}) > 1, "vacuous: plain float64 agrees too"
