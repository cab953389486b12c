"""Starts a script in real processes, as a trainer is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(world: int, script: str, *arguments: object) -> str:
    """What the ranks of ``script`` print."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--no-python"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, sys.executable, "-c", script, *map(str, arguments)],
        env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launch(world: int, script: str, *arguments: object) -> list[str]:
    """What each rank says, "rank R ... wrong N", in the ranks' order."""
    printed = run(world, script, *arguments)
    # Not by lines: ranks write at once, and a line may end after the next has begun.
    said = sorted(re.findall(r"rank \d+ .*?wrong \d+", printed))
    assert len(said) == world, printed
    return said
