"""What the measurements that are stored share: processes to measure in, and a stamp of when and of what."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers


def workers() -> ProcessPoolExecutor:
    """One process a core, each with one thread."""
    return ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"), _begin)


def _begin() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def stamp() -> dict[str, str]:
    """Today's date and the commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}


def read_part(text: str, begin: str, end: str) -> str:
    """What stands between two marks."""
    return text.partition(begin)[2].partition(end)[0].strip()


def write_part(path: Path, begin: str, end: str, lines: Sequence[str]) -> None:
    """Puts lines between a file's two marks."""
    before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, close, after = rest.partition(end)
    if not mark or not close:
        raise ValueError(f"{path} lacks {begin} ... {end}")
    path.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}", encoding="utf-8")
