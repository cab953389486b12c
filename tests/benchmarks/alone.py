"""Computations in a process of their own, so that its peak memory is theirs: seconds and MiB. Linux or CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from impl import encoder, pack
from impl.losses import InfoNCE
from impl.packing import Packed
from tests.benchmarks.workloads import founding

ROOT = Path(__file__).resolve().parents[2]

LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "whole": lambda embeddings, labels, rows: InfoNCE()(embeddings, labels),
    "chunks of 64": lambda embeddings, labels, rows: InfoNCE(chunk=64)(embeddings, labels),
    "chunks of 256": lambda embeddings, labels, rows: InfoNCE(chunk=256)(embeddings, labels),
}
POOLINGS: dict[str, Callable[[Tensor, Packed, str], Tensor]] = {"ours": encoder.pool}


def _plain_loss(embeddings: Tensor, labels: Tensor, rows: int) -> Tensor:
    """Everybody's: all similarities, and cross entropy over them."""
    groups = embeddings.unflatten(0, (-1, rows))
    target = torch.arange(len(groups), device=embeddings.device) * (rows - 1)
    return cross_entropy(groups[:, 0] @ groups[:, 1:].flatten(0, 1).T / 0.1, target)


def _padded_pooling(states: Tensor, packed: Packed, pooling: str) -> Tensor:
    """As trainers do after a packed forward pass: padded again, then pooled under a mask."""
    device, longest = states.device, packed.max_seqlen
    lengths = torch.tensor(packed.lengths, device=device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    at = owner * longest + torch.cat([torch.arange(length, device=device) for length in packed.lengths])
    rows = states.new_zeros(len(lengths) * longest, states.shape[1]).index_copy(0, at, states)
    rows, places = rows.unflatten(0, (len(lengths), longest)), torch.tensor(packed.places, device=device)
    if pooling == "last":
        return rows[places, lengths[places] - 1]
    mask = (torch.arange(longest, device=device) < lengths.unsqueeze(1)).unsqueeze(2)
    return ((rows * mask).sum(1) / lengths.unsqueeze(1))[places]


LOSSES["plain"] = _plain_loss
POOLINGS["padded again"] = _padded_pooling


def loss(form: str, groups: int, rows: int, width: int, device: str) -> Callable[[], Tensor]:
    """The loss of so many groups of so many rows, ready to run."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(groups * rows, width, generator=generator)).to(device)
    labels = torch.tensor([1.0, *[0.0] * (rows - 2)] * groups)
    return lambda: LOSSES[form](embeddings.requires_grad_(), labels, rows)


def pooling(form: str, sequences: int, how: str, width: int, device: str) -> Callable[[], Tensor]:
    """The pooled vectors' sum of squares, over the founding batch's lengths again and again."""
    lengths = founding(1 + sequences // 516)[:sequences]
    packed = pack([[0] * length for length in lengths]).to(device)
    states = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    return lambda: POOLINGS[form](states, packed, how).square().sum()


READY = {"loss": loss, "pooling": pooling}
Job = tuple[str, str, int, Any, int]  # loss, form, groups, rows, width; or pooling, form, sequences, which, width


def measure(jobs: Sequence[Job], device: str = "cpu") -> list[dict[str, float]]:
    """Each job's MiB beyond its inputs, seconds and value, forward and backward, in a fresh process."""
    # Without the threshold glibc keeps freed blocks for itself, and the peak is its own.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.benchmarks.alone", json.dumps(jobs), device]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    results: list[dict[str, float]] = json.loads(done.stdout)
    return results


def _held(device: str) -> float:
    """MiB now; from here on the peak counts anew."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    return _status("VmHWM")


def _status(field: str) -> float:
    """A line of the kernel's, in MiB. (getrusage would count the parent's memory, from before this program.)"""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(lines[field].split()[0]) / 2**10


def main(jobs: str, device: str) -> None:
    """The jobs as JSON; prints their results."""
    torch.set_num_threads(1)
    results = []
    for what, *job in json.loads(jobs):
        run = READY[what](*job, device)
        before, start = _held(device), time.perf_counter()
        value = run()
        value.backward()  # type: ignore[no-untyped-call]
        peak = _peak(device)
        results.append({"mib": peak - before, "s": time.perf_counter() - start, "value": value.item()})
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
