"""Times that can be compared: several things run in turns, round after round, so that all see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """seconds: each name's, round by round. peak: bytes that a CUDA run held beyond what was there."""

    seconds: dict[str, list[float]]
    peak: dict[str, int]

    def median(self, name: str) -> float:
        """Seconds, in the middle round."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, *others: str) -> float:
        """How many times as long as the ``others`` together, round against round, in the middle."""
        pairs = zip(self.seconds[name], *(self.seconds[other] for other in others), strict=True)
        return statistics.median(own / sum(rest) for own, *rest in pairs)


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", warmup: int = 1) -> Times:
    """Every run once a round, each time beginning with another; ``warmup`` rounds are thrown away."""
    names = list(runs)
    times = Times({name: [] for name in names}, {})
    for turn in range(rounds + warmup):
        start = turn % len(names)
        for name in [*names[start:], *names[:start]]:
            seconds, peak = (_on_cuda if device == "cuda" else _on_cpu)(runs[name])
            if turn >= warmup:
                times.seconds[name].append(seconds)
                times.peak[name] = max(peak, times.peak.get(name, 0))
    return times


def _on_cpu(run: Callable[[], object]) -> tuple[float, int]:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start, 0


def _on_cuda(run: Callable[[], object]) -> tuple[float, int]:
    """By events on the device, which waits for what came before and until all is done."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()  # type: ignore[no-untyped-call]
    run()
    end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000, torch.cuda.max_memory_allocated() - before  # type: ignore[no-untyped-call]
