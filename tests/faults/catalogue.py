"""The catalogue of planted faults: each the smallest wrong implementation of its kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TypeVar

from impl import PaddingFree

KINDS = (
    "founding",
    "boundaries",
    "slots",
    "leaks",
    "positions",
    "pooling",
    "padded",
    "multimodal",
    "losses",
    "replay",
    "ranks",
    "shards",
)

Kind = TypeVar("Kind", bound=type[PaddingFree])
Patch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Fault:
    """One wrong implementation, and what is known of it.

    laws: those expected to kill it, the first of them down to as many tokens as ``smallest`` has: the lengths of a
    smallest case it can show in, None where nobody knows. link: the public bug of this kind, or None for our own.
    model: the one it needs. patch: what is wrong besides the implementation: the reference's padded side.
    """

    implementation: type[PaddingFree]
    laws: tuple[str, ...]
    link: str | None = None
    model: str = "qwen3"
    smallest: tuple[int, ...] | None = None
    patch: Patch = nullcontext

    @property
    def id(self) -> str:
        """The class's name in kebab-case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", self.implementation.__name__).lower()

    @property
    def kind(self) -> str:
        """The module's name."""
        return self.implementation.__module__.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        """The docstring's first sentence, on one line."""
        return " ".join((self.implementation.__doc__ or "").split("\n\n")[0].split())

    @property
    def url(self) -> str:
        """The link as an address."""
        return f"https://github.com/{self.link}" if self.link else ""


_FAULTS: dict[type[PaddingFree], Fault] = {}


def planted(
    law: str,
    link: str | None = None,
    *,
    model: str = "qwen3",
    smallest: Sequence[int] | None = None,
    patch: Patch = nullcontext,
) -> Callable[[Kind], Kind]:
    """Enters a class into the catalogue, or a further law that kills it; ``link`` is a path on GitHub."""

    def enter(implementation: Kind) -> Kind:
        told = None if smallest is None else tuple(sorted(smallest))
        known = _FAULTS.get(implementation, Fault(implementation, (), link, model, told, patch))
        _FAULTS[implementation] = replace(known, laws=(*known.laws, law))
        return implementation

    return enter


def catalogue() -> list[Fault]:
    """Every fault, kind by kind."""
    for kind in KINDS:
        import_module(f"tests.faults.{kind}")
    return sorted(_FAULTS.values(), key=lambda fault: KINDS.index(fault.kind))
