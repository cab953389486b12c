"""Real processes for laws over ranks: a pool of gloo workers on this machine, kept alive between cases.

``python -m oracle.ranks ADDRESS STORE`` is the pool: it imports once, forks a worker for each rank, and
the workers take their shares from the address.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from oracle.case import Case, Group, Options
from oracle.contract import load
from oracle.exact import Grid, exact

WORLDS = (2, 3, 4)
MOST = max(WORLDS)
SECONDS = 120.0

Array = NDArray[np.float64]


class RankError(RuntimeError):
    """A rank raised, died or hung; names the rank."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch, and what it is to do with it."""

    implementation: str
    world: int
    rows: Array
    labels: list[float]
    options: Options
    mean_of_ranks: bool


@dataclass(frozen=True)
class RankResult:
    """What one rank computed: its loss, and the gradient of its own rows before averaging."""

    loss: Tensor
    gradient: Tensor


def specification(implementation: Any) -> str:
    """``package.module:Object`` of an implementation, for another process to load."""
    kind = type(implementation)
    return getattr(implementation, "specification", f"{kind.__module__}:{kind.__qualname__}")


def loss_scale(world: int) -> int:
    """A rank's loss scale: its loss has so many times the gradient, so that averaging gives the whole's.

    The same quantity must have the same scale in both computations. Only a power of two can be undone.
    """
    return Grid.loss_scale - round(math.log2(world))


def _compute(share: Share, groups: dict[int, Any]) -> tuple[Array, Array]:
    rows = torch.from_numpy(share.rows).requires_grad_()
    with exact(loss_scale=loss_scale(share.world)):
        loss = load(share.implementation).rank_loss(
            rows, share.labels, share.options, groups[share.world], share.mean_of_ranks
        )
        loss.backward()
    assert rows.grad is not None
    return loss.detach().numpy(), rows.grad.numpy()


def _worker(rank: int, address: str, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with Client(address) as parent:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MOST)
        groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
        parent.send(rank)
        while True:
            try:
                share = parent.recv()
            except EOFError:
                return
            try:
                parent.send(_compute(share, groups))
            except Exception as error:
                parent.send(f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")


def _serve(address: str, store: str) -> None:
    """Forks the workers, and waits for them."""
    for rank in range(MOST):
        if os.fork() == 0:
            _worker(rank, address, store)
            os._exit(0)
    for _ in range(MOST):
        os.wait()


class Pool:
    """Four workers; a case uses the first two, three or four of them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        address, store = (str(Path(self._folder.name) / name) for name in ("socket", "store"))
        with Listener(address) as listener:
            listener._listener._socket.settimeout(SECONDS)  # type: ignore[attr-defined]  # a pool that cannot start
            command = [sys.executable, "-m", "oracle.ranks", address, store]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
            self._server = subprocess.Popen(command, env=environment, start_new_session=True)
            pipes = [listener.accept() for _ in range(MOST)]
        self._pipes: dict[int, Connection] = {self._answer(pipe, "a new rank"): pipe for pipe in pipes}

    def run(self, shares: Sequence[Share]) -> list[RankResult]:
        """Each rank's result for its share.

        Raises RankError if one raises, dies or takes longer than two minutes; the pool is closed then.
        """
        for rank, share in enumerate(shares):
            self._pipes[rank].send(share)
        answers = [self._answer(self._pipes[rank], f"rank {rank} of {len(shares)}") for rank in range(len(shares))]
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                self.close()
                raise RankError(f"rank {rank} of {len(shares)} raised {answer}")
        return [RankResult(torch.from_numpy(loss), torch.from_numpy(gradient)) for loss, gradient in answers]

    def _answer(self, pipe: Connection, who: str) -> Any:
        if not pipe.poll(SECONDS):
            self.close()
            raise RankError(f"{who} gave no answer in {SECONDS:.0f} s: it hangs")
        try:
            return pipe.recv()
        except EOFError as error:
            self.close()
            raise RankError(f"{who} died") from error

    def close(self) -> None:
        """Ends the workers; the next case starts others."""
        pool.cache_clear()
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._folder.cleanup()


@cache
def pool() -> Pool:
    """The pool of this process, started when first asked for."""
    started = Pool()
    atexit.register(started.close)
    return started


def spread(case: Case, ranks: int) -> list[tuple[Group, ...]]:
    """The case's groups over ranks, unevenly: one each, the last rank takes the rest."""
    return [(group,) for group in case.groups[: ranks - 1]] + [case.groups[ranks - 1 :]]


def row_counts(shares: Sequence[tuple[Group, ...]]) -> list[int]:
    """How many rows each rank holds."""
    return [sum(len(group.sequences) for group in share) for share in shares]


def over_ranks(
    implementation: Any, case: Case, rows: Tensor, ranks: int, mean_of_ranks: bool = False
) -> list[RankResult]:
    """The implementation's ``rank_loss`` with the case's groups, and their rows [n, d], ``spread`` over ranks."""
    name, shares = specification(implementation), spread(case, ranks)
    return pool().run(
        [
            Share(name, ranks, part.numpy(), Case(groups, options=case.options).labels, case.options, mean_of_ranks)
            for part, groups in zip(rows.split(row_counts(shares)), shares, strict=True)
        ]
    )


if __name__ == "__main__":
    _serve(*sys.argv[1:])
