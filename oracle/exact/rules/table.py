"""The table of rules: operator name -> the small function that computes it exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Compute = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """An operator's exact meaning.

    compute: takes the ``Arithmetic`` and then the operator's own arguments.
    on_grid: the results lie on the addend grid already; otherwise the mode puts them there.
    """

    compute: Compute
    on_grid: bool


RULES: dict[str, Rule] = {}


def rule(*names: str, on_grid: bool = False) -> Callable[[Compute], Compute]:
    """Registers a function as the exact meaning of the operators ``names`` (as ``aten::mm``).

    A name without an overload serves all its overloads; in-place and ``out=`` forms are derived.
    """

    def register(function: Compute) -> Compute:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = Rule(function, on_grid)
        return function

    return register
