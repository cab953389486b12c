"""One tree against another commit, by turns: python -m tests.benchmarks.against REF; exit 1 if impl has become slower.

Both run in processes of their own that wait for each other, on the same batches through the same model, so that a busy
machine slows both. They share one core and keep their memory: on two cores, and with pages that come and go, the same
code differed from itself by up to 26 %; so it does by 3 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parents[2]
WORK = ("W1 forward", "W1 backward", "W3 forward", "W3 backward", "loss backward")
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**28)}


class Side:
    """One tree's impl, in a process that runs what it is told and answers with seconds."""

    def __init__(self, tree: Path) -> None:
        environment = os.environ | KEPT | {"PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
        command = [sys.executable, "-P", "-c", "from tests.benchmarks.against import serve; serve()"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree)
        where = self._ask("where")
        if not Path(where).is_relative_to(tree.resolve()):
            raise RuntimeError(f"impl came from {where}, not from {tree}")

    def _ask(self, what: str) -> str:
        pipes: tuple[IO[str] | None, ...] = (self._process.stdin, self._process.stdout)
        assert pipes[0] is not None
        assert pipes[1] is not None
        print(what, file=pipes[0], flush=True)
        answer = pipes[1].readline().strip()
        if not answer:
            raise RuntimeError(f"the process that runs {what!r} ended with {self._process.wait()}")
        return answer

    def seconds(self, work: str) -> float:
        """Runs it once."""
        return float(self._ask(work))

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.wait()


def serve() -> None:
    """The other end: one line in, one line out."""
    import impl
    from tests.benchmarks.workloads import WIDTH, WORKLOADS, qwen3, sequences

    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    batches = {name: sequences(WORKLOADS[name]()) for name in ("W1", "W3")}
    rows = torch.nn.functional.normalize(torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(0)), dim=1)
    for line in sys.stdin:
        name, _, direction = line.strip().partition(" ")
        start = time.perf_counter()
        with torch.set_grad_enabled(direction == "backward"):
            if name == "where":
                print(impl.__file__, flush=True)
                continue
            if name == "loss":
                value = impl.infonce(rows.clone().requires_grad_(), [1.0, *[0.0] * 6] * 256)
            else:
                qwen3().zero_grad()
                found = impl.encode(qwen3(), impl.pack(batches[name]))
                value = (found * found.detach().roll(1, 0)).sum()
            if direction == "backward":
                value.backward()  # type: ignore[no-untyped-call]
        print(time.perf_counter() - start, flush=True)


def ratios(base: Side, head: Side, rounds: int) -> dict[str, float]:
    """Head's time over base's for each kind of work: the middle of the rounds' ratios."""
    found = {}
    for work in WORK:
        pairs = []
        for turn in range(rounds + 1):
            order = (base, head) if turn % 2 else (head, base)
            seconds = {side: side.seconds(work) for side in order}
            if turn:  # the first warms both up
                pairs.append(seconds[head] / seconds[base])
        found[work] = statistics.median(pairs)
    return found


def unpacked(reference: str, folder: Path) -> Path:
    """The reference's impl, in a folder."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", reference, "impl"], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def main() -> int:
    """Returns 1 if anything takes more than ``--limit`` times as long as it did."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.against", description=__doc__)
    parser.add_argument("reference", help="a commit, branch or tag")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--limit", type=float, default=1.1, help="the greatest ratio that passes (default 1.1)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder, "head")
        head.mkdir()
        (head / "impl").symlink_to(ROOT / "impl")
        base = Path(folder, "base")
        base.mkdir()
        sides = [Side(unpacked(given.reference, base)), Side(head)]
        try:
            found = ratios(*sides, given.rounds)
        finally:
            for side in sides:
                side.close()
    for work, ratio in found.items():
        print(f"{work:14} {ratio:5.2f} times {given.reference}'s time{'  SLOWER' if ratio > given.limit else ''}")
    slower = [work for work, ratio in found.items() if ratio > given.limit]
    print(f"AGAINST {given.reference}: {len(slower)} of {len(found)} slower than {given.limit} times")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
