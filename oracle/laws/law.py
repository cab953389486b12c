"""What a law is, and what it says when it is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis.strategies import SearchStrategy

from oracle.case import Case
from oracle.strategies import cases, image_cases, long_cases, loss_cases, mesh_cases

Check = Callable[[Any, Case], None]


class Broken(AssertionError):
    """An implementation breaks a law; the message is for a reader who knows neither.

    Args:
        summary: one line, the first wrong sequence in it where there is one.
        details: further lines: pictures, sizes.
    """

    def __init__(self, summary: str, details: Sequence[str] = ()):
        self.summary = summary
        self.details = list(details)
        super().__init__("\n".join([summary, *self.details]))


class HangError(Broken):
    """Ranks that wait for each other for ever: found once, and not shrunk, since every try takes its time."""


class VacuousError(RuntimeError):
    """A comparison that could not have failed; the suite's own fault, never the implementation's."""


@dataclass(frozen=True)
class Law:
    """One sentence that must hold.

    family, name: as in ``agreement.embeddings_equal_the_padded_ones``. sentence: the docstring's first
    line. surfaces: any one of them suffices. check: returns, or raises ``Broken``. draw: options of
    ``strategies.cases``, or with ``loss``, ``images``, ``meshes`` or ``beyond`` of ``strategies.loss_cases``,
    ``image_cases``, ``mesh_cases`` or ``long_cases``. share: cases drawn, relative to other laws.
    """

    family: str
    name: str
    sentence: str
    surfaces: tuple[str, ...]
    check: Check
    draw: dict[str, Any] = field(default_factory=dict)
    share: int = 10

    def strategy(self, model: str) -> SearchStrategy[Case]:
        """The cases it is tried on."""
        special = {"loss": loss_cases, "images": image_cases, "meshes": mesh_cases, "beyond": long_cases}
        maker: Any = next((make for option, make in special.items() if option in self.draw), cases)
        drawn: SearchStrategy[Case] = maker(model=model, **self.draw)
        return drawn

    @property
    def title(self) -> str:
        """family.name."""
        return f"{self.family}.{self.name}"


LAWS: list[Law] = []


def law(*surfaces: str, share: int = 10, **draw: Any) -> Callable[[Check], Check]:
    """Registers a check as a law of its module's family; its docstring is the sentence."""

    def register(check: Check) -> Check:
        family = check.__module__.rpartition(".")[2]
        sentence = (check.__doc__ or "").strip().splitlines()[0]
        LAWS.append(Law(family, check.__name__, sentence, surfaces, check, draw, share))
        return check

    return register


# --- pictures ---------------------------------------------------------------------------------------

WIDEST = 72


def picture(positions: Sequence[int], lengths: Sequence[int] | None = None) -> str:
    """A stream's position ids with a bar before and after every sequence; -1 is drawn as a dot.

    lengths: real tokens of each sequence as somebody found them; None: one where each 0 stands.

    >>> picture([0, 0, 1, -1], [1, 2])
    '|0|0 1|.'
    """
    if not positions:
        return "(none)"
    starts = _starts(positions, lengths)
    drawn = ""
    for at, position in enumerate(positions):
        ends_here = at > 0 and (position < 0) and positions[at - 1] >= 0
        bar = "|" if at in starts or ends_here else "" if at == 0 else " "
        drawn += bar + ("." if position < 0 else str(position))
    drawn += "" if positions and positions[-1] < 0 else "|"
    return drawn if len(drawn) <= WIDEST else drawn[: WIDEST - 3] + "..."


def _starts(positions: Sequence[int], lengths: Sequence[int] | None) -> set[int]:
    if lengths is None:
        return {at for at, position in enumerate(positions) if position == 0}
    real = [at for at, position in enumerate(positions) if position >= 0]
    starts, taken = set(), 0
    for length in lengths:
        if taken < len(real):
            starts.add(real[taken])
        taken += max(0, length)
    return starts
