"""Real processes for laws over ranks: a pool of gloo workers on this machine, kept alive between cases.

``python -m oracle.ranks ADDRESS FOLDER`` imports once, and forks a worker for each rank whenever it is asked to;
the workers take their tasks from the address.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from oracle.case import Case, CaseError, Group, Mesh, Options
from oracle.contract import HarnessError, declines, load
from oracle.exact import ExactError, Grid, exact, plain
from oracle.models import tiny

WORLDS = (2, 3, 4)
MOST = max(WORLDS)
START_SECONDS = 120.0
CASE_SECONDS = float(os.environ.get("ORACLE_RANK_SECONDS", "60"))  # a case takes less than one
GRACE_SECONDS = 2.0  # after one rank's error: for the others to report theirs

Array = NDArray[np.float64]


class RankError(RuntimeError):
    """A rank raised or died; names it."""


class RankHangError(RankError):
    """Ranks gave no answer in time."""


class RankDeclinedError(RankError):
    """The ranks of a batch raised NotImplementedError."""


class _DiedError(RankError):
    """In place of an answer."""


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank of a mesh, torch.distributed's.

    ulysses, ring: the ranks it exchanges heads with, and those its keys and values go round. sequence: all
    that share its sequences. data: one rank of each batch, in the same place. world: every rank.
    """

    ulysses: Any
    ring: Any
    sequence: Any
    data: Any
    world: Any


class Task(Protocol):
    """What one rank is to do; any answer that can be sent."""

    def compute(self, worlds: Worlds) -> Any:
        """In the rank's own process."""
        ...


# --- tasks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch, whose loss it is to compute."""

    implementation: str
    world: int
    rows: Array
    labels: list[float]
    options: Options
    mean_of_ranks: bool

    def compute(self, worlds: Worlds) -> RankResult:
        """The loss, and the gradient of its own rows before averaging."""
        rows = torch.from_numpy(self.rows).requires_grad_()
        implementation = load(self.implementation)  # its set-up is not for exact arithmetic
        with exact(loss_scale=loss_scale(self.world)):
            loss = implementation.rank_loss(
                rows, self.labels, self.options, worlds.subset(range(self.world)), self.mean_of_ranks
            )
            loss.backward()
        assert rows.grad is not None
        return RankResult(loss.detach(), rows.grad)


@dataclass(frozen=True)
class RankResult:
    """What one rank computed: its loss, and the gradient of its own rows before averaging."""

    loss: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class ShardedStep:
    """One rank's training step: its batch's groups, of which ``case.mesh.sharing`` ranks each hold a part.

    surface: ``sharded_step`` or ``streaming_step``. exactly: in exact arithmetic, else in ``plain`` float64.
    """

    implementation: str
    case: str
    surface: str
    exactly: bool

    def compute(self, worlds: Worlds) -> ShardedResult:
        """Embeddings, loss, and the rank's own gradients."""
        case = Case.from_json(self.case)
        model = tiny(case.model, case.seed)
        step = getattr(load(self.implementation), self.surface)
        with exact(loss_scale=loss_scale(case.mesh.ranks)) if self.exactly else plain():
            made = step(model, case, worlds.groups(case.mesh))
        gradients = {name: gradient.detach() for name, gradient in made.gradients.items()}
        return ShardedResult(made.embeddings.detach(), made.loss.detach(), gradients)


@dataclass(frozen=True)
class ShardedResult:
    """What one rank has after a step: its batch's embeddings, the loss, and gradients.

    From a rank its own gradients; from ``over_mesh`` their mean over all ranks.
    """

    embeddings: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def specification(implementation: Any) -> str:
    """``package.module:Object`` of an implementation, for another process to load."""
    kind = type(implementation)
    return getattr(implementation, "specification", f"{kind.__module__}:{kind.__qualname__}")


def loss_scale(world: int) -> int:
    """A rank's loss scale: its loss has so many times the gradient, so that averaging gives the whole's.

    The same quantity must have the same scale in both computations. Only a power of two can be undone.
    """
    return Grid.loss_scale - round(math.log2(world))


# --- workers ----------------------------------------------------------------------------------------


class Worlds:
    """The process groups of every mesh of two to four ranks; all workers make them in the same order."""

    def __init__(self, rank: int):
        self._rank = rank
        wanted = [*((r,) for r in range(MOST)), (0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3)]
        self._subsets = {ranks: dist.new_group(list(ranks)) for ranks in wanted}

    def subset(self, ranks: Sequence[int]) -> Any:
        """The group of these ranks."""
        return self._subsets[tuple(ranks)]

    def groups(self, mesh: Mesh) -> Groups:
        """The groups of the rank here in a mesh."""
        sharing, ulysses = mesh.sharing, mesh.ulysses
        data, place = divmod(self._rank, sharing)
        base, (ring, turn) = data * sharing, divmod(place, ulysses)
        return Groups(
            ulysses=self.subset([base + ring * ulysses + u for u in range(ulysses)]),
            ring=self.subset([base + r * ulysses + turn for r in range(mesh.ring)]),
            sequence=self.subset([base + s for s in range(sharing)]),
            data=self.subset([d * sharing + place for d in range(mesh.data)]),
            world=self.subset(range(mesh.ranks)),
        )


def _worker(rank: int, address: str, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with Client(address) as parent:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MOST)
        worlds = Worlds(rank)
        parent.send(rank)
        while True:
            try:
                task = parent.recv()
            except EOFError:
                return
            try:
                parent.send(_as_numpy(task.compute(worlds)))
            except ExactError as error:
                parent.send(error)
            except Exception as error:
                told = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
                parent.send(RankDeclinedError(told) if declines(error) else RankError(told))


def _as_numpy(value: Any) -> Any:
    """Tensors as arrays: torch would share their memory between processes, and its files outlive a kill."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_numpy(each) for key, each in value.items()}
    return replace(value, **{name: _as_numpy(each) for name, each in vars(value).items()})


def _as_tensors(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.as_tensor(value)
    if isinstance(value, dict):
        return {key: _as_tensors(each) for key, each in value.items()}
    return replace(value, **{name: _as_tensors(each) for name, each in vars(value).items()})


def _serve(address: str, folder: str) -> None:
    """Forks workers whenever asked to, and ends them with the process that asked, however that ends."""
    workers: list[int] = []
    with Client(address) as parent:
        for generation in itertools.count():
            try:
                parent.recv()
            except EOFError:
                _end(workers)
                return
            _end(workers)
            for rank in range(MOST):
                child = os.fork()
                if child == 0:
                    parent.close()
                    _worker(rank, address, str(Path(folder) / f"store-{generation}"))
                    os._exit(0)
                workers.append(child)


def _end(workers: list[int]) -> None:
    while workers:
        os.kill(workers[-1], signal.SIGKILL)
        os.waitpid(workers.pop(), 0)


# --- the pool ---------------------------------------------------------------------------------------


class Pool:
    """Four workers; a case uses the first two, three or four of them.

    They are forked anew after every error, so that nothing of one case is left in the next.

    Raises HarnessError if processes cannot be had here.
    """

    def __init__(self) -> None:
        self._pipes: dict[int, Connection] = {}
        try:
            # A socket's path must be short, which a temporary folder's need not be.
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-", dir="/tmp" if Path("/tmp").is_dir() else None)
            address = str(Path(self._folder.name) / "socket")
            self._listener = Listener(address)
            self._listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]  # may never start
            command = [sys.executable, "-m", "oracle.ranks", address, self._folder.name]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
            self._server = subprocess.Popen(command, env=environment, start_new_session=True)
            self._control = self._listener.accept()
        except OSError as error:
            raise HarnessError(f"the processes for laws over ranks could not be started: {error}") from error

    def _start(self) -> None:
        """Forks four workers, in the place of those there are."""
        try:
            self._control.send("start")
            pipes: list[Connection] = [self._listener.accept() for _ in range(MOST)]
            ranks = self._answers(dict(enumerate(pipes)), START_SECONDS)
        except (OSError, RankError) as error:
            raise HarnessError(f"the processes for laws over ranks could not be started: {error}") from error
        self._pipes = {rank: pipes[i] for i, rank in ranks.items()}

    def run(self, tasks: Sequence[Task], together: int = 1) -> list[Any]:
        """Each rank's answer to its task.

        together: so many ranks in turn share a batch, and must decline it alike.

        Raises RankDeclinedError if those of one batch all do. RankError if a rank raises, dies or alone declines,
        RankHangError if one does not answer in time; ExactError where a rank's arithmetic raised it.
        """
        if not self._idle():
            self._start()
        for rank, task in enumerate(tasks):
            self._pipes[rank].send(task)
        answers: dict[int, Any] = {}
        try:
            answers = self._answers({rank: self._pipes[rank] for rank in range(len(tasks))}, CASE_SECONDS)
            self._raise(answers, len(tasks), together)
        except (RankError, ExactError):
            everybody = len(answers) == len(tasks)
            if not (everybody and all(isinstance(answer, RankDeclinedError) for answer in answers.values())):
                self._pipes = {}  # the next case gets others
            raise
        return [_as_tensors(answers[rank]) for rank in range(len(tasks))]

    def _idle(self) -> bool:
        """Whether all workers are there, with nothing to say; one that was killed has closed its pipe."""
        return len(self._pipes) == MOST and not wait(list(self._pipes.values()), 0)

    @staticmethod
    def _raise(answers: dict[int, Any], asked: int, together: int) -> None:
        """A death, which makes others raise before it is seen; else the error that came first, unless it is that a
        whole batch was declined.
        """
        for rank, answer in answers.items():
            if isinstance(answer, _DiedError):
                raise RankError(f"rank {rank} of {asked} died")
        for rank, answer in answers.items():
            if isinstance(answer, RankError) and not isinstance(answer, RankDeclinedError):
                raise RankError(f"rank {rank} of {asked} raised {answer}")
            if isinstance(answer, ExactError):
                raise answer
        declined = {rank for rank, answer in answers.items() if isinstance(answer, RankDeclinedError)}
        for first in range(0, asked, together):
            if declined.issuperset(range(first, first + together)):
                raise RankDeclinedError
        if declined:
            raise RankError(
                f"ranks {sorted(declined)} of {asked} raised NotImplementedError, others of their batch did not"
            )

    def _answers(self, pending: dict[int, Connection], seconds: float) -> dict[int, Any]:
        """What each pipe says, in the order it came; after an error, what came within the grace time."""
        found: dict[int, Any] = {}
        pending, end, asked = dict(pending), time.monotonic() + seconds, len(pending)
        while pending:
            ready = wait(list(pending.values()), max(0.0, end - time.monotonic()))
            if not ready and any(isinstance(answer, (RankError, ExactError)) for answer in found.values()):
                return found
            if not ready:
                raise RankHangError(f"ranks {sorted(pending)} of {asked} gave no answer in {seconds:.0f} s: they hang")
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    found[rank] = pending.pop(rank).recv()
                except (EOFError, OSError):
                    found[rank] = _DiedError()
                if isinstance(found[rank], (RankError, ExactError)):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return found

    def close(self) -> None:
        """Ends the workers and what forks them."""
        pool.cache_clear()
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._listener.close()
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
    implementation: Any,
    shares: Sequence[tuple[Group, ...]],
    options: Options,
    rows: Tensor,
    mean_of_ranks: bool = False,
) -> list[RankResult]:
    """The implementation's ``rank_loss`` with each rank's groups, and their rows [n, d]."""
    name = specification(implementation)
    return pool().run(
        [
            Share(name, len(shares), part.numpy(), Case(groups, options=options).labels, options, mean_of_ranks)
            for part, groups in zip(rows.split(row_counts(shares)), shares, strict=True)
        ]
    )


def over_mesh(
    implementation: Any, case: Case, surface: str = "sharded_step", exactly: bool = True
) -> list[ShardedResult]:
    """The implementation's step with the case's groups ``spread`` over the mesh's data ranks.

    The gradients of all results are the mean over ranks, as a data-parallel trainer takes it.
    """
    name, mesh = specification(implementation), case.mesh
    if mesh.ranks not in (1, 2, 4) or mesh.data > len(case.groups):
        raise CaseError(f"{mesh} for {len(case.groups)} groups: a mesh has 1, 2 or 4 ranks, and a group for each batch")
    tasks = [
        ShardedStep(name, replace(case, groups=groups, stream=_stream(case, groups)).to_json(), surface, exactly)
        for groups in spread(case, mesh.data)
        for _ in range(mesh.sharing)
    ]
    results = pool().run(tasks, mesh.sharing)
    names = sorted({name for result in results for name in result.gradients})
    mean = {
        name: torch.stack([r.gradients[name] for r in results if name in r.gradients]).sum(0) / mesh.ranks
        for name in names
    }
    return [replace(result, gradients=mean) for result in results]


def _stream(case: Case, groups: Sequence[Group]) -> Any:
    """The case's layout for some of its groups: another order where it is for all of them."""
    count = sum(len(group.sequences) for group in groups)
    if case.stream.order is None or count == len(case.stream.order):
        return case.stream
    return replace(case.stream, order=tuple(reversed(range(count))))


if __name__ == "__main__":
    # The tasks that workers unpickle are the package's, not those of a module called __main__.
    from oracle.ranks import _serve as serve

    serve(*sys.argv[1:])
