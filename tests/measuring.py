"""What the measurements that are stored share: processes to measure in, and a stamp of when and of what."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime

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
