"""One fault before the whole suite, as a stranger's implementation would be: no hint which law will do.

The laws are taken in turn, each as often as its share, so that "examples to kill" counts every case drawn until
the first one that breaks a law. A law's verdict on a fault that changes nothing it calls is its verdict on the
right implementation: it holds, and its cases are counted without being computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from impl import PaddingFree
from oracle import reference
from oracle.case import Case
from oracle.contract import SURFACES, HarnessError
from oracle.laws import LAWS, Broken, Law
from oracle.models import tiny
from oracle.suite import canary, judge, shares, try_law
from tests.drawing import drawn
from tests.faults.catalogue import Fault

EXAMPLES = 1600  # of ``python -m oracle check``
SEEDS = 20
CANARY = "the reference against itself"

# What a law calls in other processes, where it cannot be watched.
ELSEWHERE = {
    "rank_loss": {"rank_loss"},
    "sharded_step": {"sharded_step", "pack"},
    "streaming_step": {"streaming_step", "sharded_step", "pack"},
}


@dataclass(frozen=True)
class Kill:
    """The law that broke first, after so many cases and seconds."""

    law: str
    examples: int
    seconds: float


@dataclass
class Trial:
    """What became of a fault: a kill for each seed (None: it survived), and the shrunk case."""

    fault: str
    kills: list[Kill | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    summary: str = ""


@cache
def schedule(examples: int = EXAMPLES) -> list[tuple[Law, int]]:
    """Which law's how-manieth case comes when: each law's cases spread evenly over the run."""
    wanted = shares(LAWS, examples)
    turns = [
        ((k + 0.5) / wanted[law.title], at, law, k) for at, law in enumerate(LAWS) for k in range(wanted[law.title])
    ]
    return [(law, k) for _, _, law, k in sorted(turns, key=lambda turn: turn[:2])]


@cache
def cases(title: str, model: str, seed: int) -> list[Case]:
    """A law's cases of one run."""
    law = next(law for law in LAWS if law.title == title)
    return drawn(law.strategy(model), shares(LAWS, EXAMPLES)[title], of=seed)


class _Watched(PaddingFree):
    """The right implementation, which notes what is called of it."""

    seen: set[str]

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "__dict__").setdefault("seen", set()).add(name)
        return object.__getattribute__(self, name)


@cache
def called(title: str, model: str) -> tuple[frozenset[str], float]:
    """What a law calls of an implementation, and its seconds a case on the right one."""
    law = next(law for law in LAWS if law.title == title)
    elsewhere = [ELSEWHERE[surface] for surface in law.surfaces if surface in ELSEWHERE]
    watched, own = _Watched(), cases(title, model, 0)[:3]
    for case in own[:1]:
        judge(law, watched, case)  # the first one warms what is built once
    start = time.perf_counter()
    for case in own:
        judge(law, watched, case)
    seconds = (time.perf_counter() - start) / max(1, len(own))
    # Asking whether a surface is offered is not calling it; a method that calls another one is watched.
    return frozenset(watched.seen).union(*elsewhere), seconds


def changed(implementation: type[PaddingFree]) -> set[str]:
    """The methods of the right implementation that a fault replaces."""
    own = {name for kind in implementation.__mro__ if kind not in PaddingFree.__mro__ for name in vars(kind)}
    return {name for name in own if callable(getattr(PaddingFree, name, None)) and not name.startswith("__")}


def touched(fault: Fault, law: Law) -> bool:
    """Whether a law can tell a fault from the right implementation; every law can where the reference is wrong."""
    replaced = changed(fault.implementation)
    return not replaced or not replaced.isdisjoint(called(law.title, fault.model)[0])


_KNOWN: dict[Any, Any] = {}


@contextmanager
def remembered(name: str) -> Iterator[None]:
    """What the right reference says of a case is computed once for all faults."""
    models = {id(tiny(name, seed)): seed for seed in range(4)}
    inside: list[str] = []  # a step's own encode must keep its graph

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(model: Any, what: Any, *rest: Any, **given: Any) -> Any:
            if inside or id(model) not in models or given.get("images") is not None:
                return function(model, what, *rest, **given)
            mode = _get_current_dispatch_mode()
            asked = tuple(what) if isinstance(what, list) else what
            key = (function.__name__, name, models[id(model)], asked, rest, *sorted(given.items()), type(mode))
            if key not in _KNOWN:
                inside.append(function.__name__)
                try:
                    found = function(model, what, *rest, **given)
                finally:
                    inside.pop()
                _KNOWN[key] = found.detach() if isinstance(found, Tensor) else found
            return _KNOWN[key]

        return ask

    with (
        mock.patch.object(reference, "encode", once(reference.encode)),
        mock.patch.object(reference, "step", once(reference.step)),
    ):
        yield


def first_kill(fault: Fault, seed: int) -> tuple[Kill | None, Law | None]:
    """The first broken law of one run of the suite."""
    made, spent = fault.implementation(), 0.0
    wrong_reference = not changed(fault.implementation)
    with fault.patch(), nullcontext() if wrong_reference else remembered(fault.model):
        if wrong_reference:
            start = time.perf_counter()
            try:
                canary(fault.model)
            except HarnessError:
                return Kill(CANARY, 1, time.perf_counter() - start), None
        for count, (law, k) in enumerate(schedule(), 1):
            if not touched(fault, law):
                spent += called(law.title, fault.model)[1]
                continue
            own = cases(law.title, fault.model, seed)
            if k >= len(own):
                continue
            start = time.perf_counter()
            try:
                judge(law, made, own[k])
            except Broken:
                return Kill(law.title, count, spent + time.perf_counter() - start), law
            except NotImplementedError:
                pass
            spent += time.perf_counter() - start
    return None, None


def tried(fault: Fault, seeds: int = SEEDS) -> Trial:
    """Every seed's kill, and the first one's smallest case."""
    trial = Trial(fault.id)
    killer: Law | None = None
    for seed in range(seeds):
        kill, law = first_kill(fault, seed)
        trial.kills.append(kill)
        killer = killer or law
    if killer is not None:
        with fault.patch():
            found = try_law(killer, fault.implementation(), fault.model, 4 * shares(LAWS, EXAMPLES)[killer.title])
        if found.finding:
            trial.lengths, trial.summary = found.finding.case.lengths, found.finding.summary
    return trial


assert set(ELSEWHERE) <= set(SURFACES)
