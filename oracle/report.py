"""What a person sees in the terminal: progress while laws run, a table of them, counter-examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from oracle.golden import Comparison
from oracle.laws import Law
from oracle.suite import Finding, Report, Status

STYLES = {
    Status.HOLDS: "green",
    Status.BROKEN: "bold red",
    Status.NOT_OFFERED: "yellow",
    Status.DECLINED: "yellow",
    Status.NOT_RUN: "dim",
}


def header(console: Console, report_name: str, model: str, versions: dict[str, str], seed: int) -> None:
    """Who is judged, and with what."""
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "device")
    line = f"implementation {report_name}; model tiny {model}; {known}; device {versions['device']}; seed {seed}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class Watch:
    """A progress bar that follows the laws."""

    def __init__(self, progress: Progress, examples: int):
        self._progress = progress
        self._task = progress.add_task("", total=examples)
        self._before = 0
        self._law = ""

    def __call__(self, law: Law, done: int) -> None:
        """One more case of a law."""
        if law.title != self._law:
            self._law, self._before = law.title, 0
            self._progress.update(self._task, description=law.title)
        self._progress.advance(self._task, done - self._before)
        self._before = done


@contextmanager
def watching(console: Console, examples: int) -> Iterator[Watch]:
    """Shows progress for a while, where the console is a terminal."""
    columns = (TextColumn("{task.description:<52}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Watch(progress, examples)


def table(console: Console, report: Report) -> None:
    """Law by law."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("law", "left"), ("verdict", "left"), ("cases", "right"), ("s", "right")):
        grid.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for result in report.results:
        if result.status is Status.NOT_RUN:
            continue
        skipped = result.declined if result.status is Status.HOLDS else 0
        declined = f", {skipped} declined" if skipped else ""
        verdict = Text(f"{result.status}{declined}", STYLES[result.status])
        grid.add_row(result.law, verdict, str(result.cases), f"{result.seconds:.1f}")
    console.print(grid)
    if unrun := report.count(Status.NOT_RUN):
        console.print(f"{unrun} laws after the broken one were not run; --all runs them", highlight=False)


def finding(console: Console, found: Finding, sentence: str, saved: Path) -> None:
    """A broken law: what it says, the smallest case, how to see it again."""
    lines = [
        "",
        f"BROKEN {found.law}",
        f"  The law: {sentence}",
        f"  Here: {found.summary}",
        *(f"    {line}" for line in found.details),
        f"  Smallest case, lengths {found.case.lengths}: {found.case.to_json()}",
        f"  Replay: python -m oracle replay {saved}",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


# --- golden files -----------------------------------------------------------------------------------


def golden_verdict(found: Comparison) -> str:
    """One line."""
    differing = len({change.name for change in found.changes})
    return f"GOLDEN {found.checked} cases, {differing} differ, {len(found.missing)} missing, {len(found.unused)} unused"


def golden_lines(found: Comparison) -> list[str]:
    """Everything that differs: which case, which tensor, the first differing sequence, old and new."""
    lines = [f"{c.name}, {c.who}, {c.tensor}: {c.told}" for c in found.changes]
    lines += [f"{name}: its files are missing; nox -s golden -- --update writes them" for name in found.missing]
    lines += [f"{name}: no case asks for this file" for name in found.unused]
    return [*lines, golden_verdict(found)]


def golden_markdown(found: Comparison) -> str:
    """A table for a pull request's job summary."""
    rows = ["| case | who | tensor | what changed |", "|---|---|---|---|"]
    rows += [f"| {c.name} | {c.who} | {c.tensor} | {c.told.replace('|', ' ')} |" for c in found.changes]
    rows += [f"| {name} | file | | missing |" for name in found.missing]
    rows += [f"| {name} | file | | unused |" for name in found.unused]
    table_ = "\n".join(rows) if len(rows) > 2 else "Oracle and implementation equal every golden file in every bit."
    return f"## Golden files\n\n{golden_verdict(found)}\n\n{table_}\n"
