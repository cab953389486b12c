"""The kill matrix: every planted fault before the suite, and before the check styles of other projects.

python -m tests.faults.matrix            prints it; the last line is KILLED k of n, and a survivor fails
python -m tests.faults.matrix --write    stores it as well: matrix.json, MATRIX.md and the README's table;
                                         with --only ID ... these rows alone are measured and put in their places
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from oracle.page import by_kind, killed, table
from oracle.suite import versions
from tests.faults import styles, trial
from tests.faults.catalogue import KINDS, Fault, catalogue
from tests.measuring import stamp, workers, write_part

FOLDER = Path(__file__).parent
STORED, TABLE, README = FOLDER / "matrix.json", FOLDER / "MATRIX.md", FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- kill matrix: python -m tests.faults.matrix --write -->", "<!-- end of the kill matrix -->"


Measurement = Callable[[Sequence[str], int], "list[Row]"]


@dataclass
class Row:
    """What is published of one fault."""

    fault: str
    kind: str
    sentence: str
    url: str
    model: str
    killed: int  # of so many seeds
    seeds: int
    laws: dict[str, int]  # the law that broke first, in how many seeds
    median: float  # examples to kill
    p95: float
    seconds: float
    lengths: list[int] = field(default_factory=list)
    summary: str = ""
    styles: dict[str, bool] = field(default_factory=dict)
    reach: bool = True
    date: str = ""
    commit: str = ""


@dataclass
class Matrix:
    """All rows, and what they were measured with."""

    versions: dict[str, str]
    seeds: int
    rows: list[Row]
    alarms: dict[str, int]

    @property
    def survivors(self) -> list[Row]:
        """Faults that some seed let through."""
        return [row for row in self.rows if row.killed < row.seeds]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[max(0, -(-int(share * 100) * len(ranked) // 100) - 1)]


def measured(identities: Sequence[str], seeds: int) -> list[Row]:
    """Some faults, in one process."""
    return [_row(fault, seeds) for fault in catalogue() if fault.id in identities]


def compared(identities: Sequence[str], seeds: int) -> list[Row]:
    """The stored rows of some faults, with the styles' verdicts measured anew."""
    stored = {row.fault: row for row in load().rows}
    own = [fault for fault in catalogue() if fault.id in identities]
    for fault in own:
        stored[fault.id].styles = {style.name: styles.caught(style, fault) for style in styles.STYLES}
    return [stored[fault.id] for fault in own]


def _row(fault: Fault, seeds: int) -> Row:
    """One fault before the suite and before every style."""
    found = trial.tried(fault, seeds)
    kills = [kill for kill in found.kills if kill is not None]
    examples = [kill.examples for kill in kills] + [trial.EXAMPLES] * (seeds - len(kills))
    return Row(
        fault.id,
        fault.kind,
        fault.sentence,
        fault.url,
        fault.model,
        len(kills),
        seeds,
        dict(Counter(kill.law for kill in kills).most_common()),
        statistics.median(examples),
        percentile(examples, 0.95),
        round(statistics.median([kill.seconds for kill in kills]), 2) if kills else float("nan"),
        found.lengths,
        found.summary,
        {style.name: styles.caught(style, fault) for style in styles.STYLES},
        styles.within_reach(fault),
        **stamp(),
    )


def measure(faults: Sequence[Fault], seeds: int, console: Console, one: Measurement = measured) -> Matrix:
    """Every fault, over the machine's cores."""
    rows: dict[str, Row] = {}
    with Progress(console=console, transient=True) as progress, workers() as pool:
        bar = progress.add_task("faults", total=len(faults))
        pending = [pool.submit(one, own, seeds) for own in _portions(faults)]
        for done in as_completed(pending):
            for row in done.result():
                rows[row.fault] = row
                progress.advance(bar)
                if not console.is_terminal:
                    console.print(_line(row), soft_wrap=True, highlight=False, markup=False)
    alarms = {style.name: styles.alarms(style) for style in styles.STYLES}
    return Matrix(versions(), seeds, [rows[fault.id] for fault in faults], alarms)


def merged(stored: Matrix, anew: Matrix) -> Matrix:
    """The stored matrix with some rows measured anew, in the catalogue's order."""
    rows = {row.fault: row for row in [*stored.rows, *anew.rows]}
    return Matrix(anew.versions, anew.seeds, [rows[fault.id] for fault in catalogue()], anew.alarms)


def _portions(faults: Sequence[Fault]) -> Iterator[list[str]]:
    """What one process does at a time: all faults of a model, whose cases are drawn once; of the default one a few."""
    for model in sorted({fault.model for fault in faults} - {"qwen3"}):
        yield [fault.id for fault in faults if fault.model == model]
    default = [fault.id for fault in faults if fault.model == "qwen3"]
    yield from (default[start : start + 4] for start in range(0, len(default), 4))


def _line(row: Row) -> str:
    law = next(iter(row.laws), "SURVIVED")
    return (
        f"{row.fault:32} {law:58} {row.killed:2} of {row.seeds}  {row.median:6.0f} {row.p95:5.0f} "
        f"{row.seconds:7.2f} s  {_short(row.lengths)}"
    )


def _short(lengths: Sequence[int]) -> str:
    return " ".join(map(str, lengths[:12])) + (" ..." if len(lengths) > 12 else "")


# --- as text ----------------------------------------------------------------------------------------


def killed_line(matrix: Matrix) -> str:
    """The last line of every run."""
    return f"KILLED {killed([asdict(row) for row in matrix.rows])}"


def style_lines(matrix: Matrix) -> Iterator[str]:
    """Each style's count, in words."""
    for style in styles.STYLES:
        yield f"{style.name}: killed {_caught(style, matrix.rows)}"


def _caught(style: styles.Style, rows: Sequence[Row]) -> str:
    return f"{sum(row.styles[style.name] for row in rows)} of {len(rows)}"


def summary(matrix: Matrix) -> list[str]:
    """The README's part: kinds, then styles."""
    rows = [asdict(row) for row in matrix.rows]
    reach = [row for row in matrix.rows if row.reach]
    checks = [("**this suite**", killed(rows), killed([row for row in rows if row["reach"]]), 0)]
    for style in styles.STYLES:
        checks.append((style.name, _caught(style, matrix.rows), _caught(style, reach), matrix.alarms[style.name]))
    links = len({row.url for row in matrix.rows if row.url})
    return [
        f"{killed_line(matrix)} planted faults, of {links} public bugs and our own, over {matrix.seeds} seeds each, "
        f"torch {matrix.versions['torch']}, {max(row.date for row in matrix.rows)}:",
        "",
        *table(("kind", "killed", "public", "examples to kill, median", "seconds"), by_kind(rows)),
        "",
        *table(("check", "kills", "of those that change an embedding, a loss or a step", "false alarms"), checks),
    ]


def full(matrix: Matrix) -> list[str]:
    """MATRIX.md."""
    lines = [
        "# The kill matrix",
        "",
        "Written by `python -m tests.faults.matrix --write`; not by hand. Every fault goes before the whole suite, "
        "with no hint which law will do. Examples: cases drawn until the first broken law, all laws counted. Smallest: "
        "the lengths of the shrunk case.",
        "",
        *summary(matrix),
    ]
    names = [style.name for style in styles.STYLES]
    for kind in KINDS:
        lines += ["", f"## {kind}", ""]
        cells = []
        for row in (row for row in matrix.rows if row.kind == kind):
            what = (
                f"{row.sentence} [{row.url.removeprefix('https://github.com/')}]({row.url})"
                if row.url
                else row.sentence
            )
            law = next(iter(row.laws), "SURVIVED")
            by = " ".join(str(1 + at) for at, name in enumerate(names) if row.styles[name]) or "none"
            cells.append(
                (f"`{row.fault}`", what, law, f"{row.median:.0f} / {row.p95:.0f}", row.seconds, _short(row.lengths), by)
            )
        head = ("fault", "what is wrong", "first broken law", "examples, median / p95", "seconds", "smallest", "styles")
        lines += table(head, cells)
    lines += ["", "Styles by number: " + "; ".join(f"{1 + at} {name}" for at, name in enumerate(names)) + ".", ""]
    return lines


def load() -> Matrix:
    """The stored matrix."""
    raw: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return Matrix(**{**raw, "rows": [Row(**row) for row in raw["rows"]]})


def write(matrix: Matrix) -> None:
    """matrix.json, MATRIX.md, and the README's part."""
    STORED.write_text(json.dumps(asdict(matrix), indent=1) + "\n", encoding="utf-8")
    TABLE.write_text("\n".join(full(matrix)), encoding="utf-8")
    write_part(README, BEGIN, END, summary(matrix))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a fault survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument("--seeds", type=int, default=trial.SEEDS)
    parser.add_argument("--only", nargs="*", help="ids of faults")
    parser.add_argument("--styles", action="store_true", help="only the styles' part, of the stored rows")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    faults = [fault for fault in catalogue() if not given.only or fault.id in given.only]
    matrix = measure(faults, given.seeds, console, compared if given.styles else measured)
    if given.write:
        write(merged(load(), matrix) if given.only else matrix)
    for lines in (map(_line, matrix.rows), style_lines(matrix)):
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for row in matrix.survivors:
        console.print(
            f"SURVIVED {row.fault}: {row.seeds - row.killed} of {row.seeds} seeds. {row.sentence}", markup=False
        )
    console.print(killed_line(matrix))
    return 1 if matrix.survivors else 0


if __name__ == "__main__":
    sys.exit(main())
