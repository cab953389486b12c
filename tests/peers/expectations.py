"""What released packages break: expectations.json, which a run is held against, and the README's track record.

``broken`` is measured, an entry for each law that an adapter breaks; ``faults`` is written by hand, one for each cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oracle.page import table
from oracle.suite import Report, Status
from tests.measuring import stamp

FOLDER = Path(__file__).parent
STORED, README = FOLDER / "expectations.json", FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- track record: python -m tests.peers --readme -->", "<!-- end of the track record -->"

# A trainer as it is shipped gets there; only who calls the function with such input; of the size of rounding.
REACHES = ("trainer", "call", "rounding")


@dataclass
class Fault:
    """One cause. known: the upstream thread, or empty: found by us. finding: the report's file, or empty."""

    what: str
    reach: str
    known: str = ""
    finding: str = ""


@dataclass
class Entry:
    """One broken law. fault: the cause's name. lengths: of the shrunk case's sequences."""

    peer: str
    adapter: str
    law: str
    fault: str
    lengths: list[int]
    shows: str


@dataclass
class Run:
    """One adapter's last run: how many laws held over how many cases."""

    peer: str
    adapter: str
    held: int
    cases: int
    date: str
    versions: dict[str, str]


@dataclass
class Expectations:
    """The whole file."""

    faults: dict[str, Fault] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    broken: list[Entry] = field(default_factory=list)

    def of(self, peer: str, adapter: str) -> dict[str, Entry]:
        """What this adapter is to break, by law."""
        return {each.law: each for each in self.broken if (each.peer, each.adapter) == (peer, adapter)}

    def gaps(self) -> Iterator[str]:
        """What nobody has written yet."""
        for entry in self.broken:
            if entry.fault not in self.faults:
                yield f"{entry.peer}, {entry.adapter}, {entry.law}: no cause is named; smallest {entry.lengths}"
        for name, fault in self.faults.items():
            if not any(entry.fault == name for entry in self.broken):
                yield f"the cause {name} breaks nothing"
            if not fault.what or fault.reach not in REACHES:
                yield f"the cause {name} needs a sentence, and one of {', '.join(REACHES)}"
            if fault.reach != "rounding" and not fault.known and not fault.finding:
                yield f"the cause {name} is ours to report: it needs a finding, or the thread that knows it"
            if fault.finding and not (FOLDER / "findings" / fault.finding).exists():
                yield f"the cause {name} names the finding {fault.finding}, which does not exist"


def load(path: Path = STORED) -> Expectations:
    """The stored expectations."""
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Expectations(
        {name: Fault(**each) for name, each in raw["faults"].items()},
        [Run(**each) for each in raw["runs"]],
        [Entry(**each) for each in raw["broken"]],
    )


def save(expectations: Expectations, path: Path = STORED) -> None:
    """Writes the file, in an order of its own."""
    expectations.runs.sort(key=lambda each: (each.peer, each.adapter))
    expectations.broken.sort(key=lambda each: (each.peer, each.adapter, each.law))
    path.write_text(json.dumps(asdict(expectations), indent=1) + "\n", encoding="utf-8")


def surprises(expected: dict[str, Entry], report: Report) -> Iterator[str]:
    """Laws that break and are not listed, and the other way round; a run that judged nothing."""
    if not report.count(Status.HOLDS) + report.count(Status.BROKEN):
        yield "every case was declined"
    found = {each.law: each.finding for each in report.results if each.finding}
    for law, finding in found.items():
        if law not in expected:
            yield f"{law} breaks and is not expected to, lengths {finding.case.lengths}: {finding.summary}"
    for law, entry in expected.items():
        if law not in found:
            status = next((each.status for each in report.results if each.law == law), "no law of this name")
            yield f"{law} is expected to break ({entry.fault}), and: {status}"


def recorded(stored: Expectations, peer: str, adapter: str, report: Report) -> None:
    """Puts a run in the place of the last one; the causes that somebody named stay with their laws."""
    before = stored.of(peer, adapter)
    stored.broken = [each for each in stored.broken if (each.peer, each.adapter) != (peer, adapter)]
    stored.runs = [each for each in stored.runs if (each.peer, each.adapter) != (peer, adapter)]
    for result in report.results:
        if result.finding:
            fault = before[result.law].fault if result.law in before else ""
            case, summary = result.finding.case, result.finding.summary
            stored.broken.append(Entry(peer, adapter, result.law, fault, case.lengths, summary))
    cases = sum(each.cases - each.declined for each in report.results)
    known = {name: version for name, version in report.versions.items() if name in ("torch", "transformers")}
    stored.runs.append(Run(peer, adapter, report.count(Status.HOLDS), cases, stamp()["date"], known))


# --- the README's part ------------------------------------------------------------------------------


def track_record(stored: Expectations) -> list[str]:
    """One row for each package and cause that is a bug; what every run held; the causes that are rounding."""
    rows, rounding = [], []
    packages = dict.fromkeys(_split(each.peer)[0] for each in stored.broken)
    for package in sorted(packages):
        for name, fault in stored.faults.items():
            own = [each for each in stored.broken if each.fault == name and _split(each.peer)[0] == package]
            if own and fault.reach == "rounding":
                rounding.append(f"* {package}: {fault.what}.")
            elif own:
                rows.append(_row(package, fault, own, stored.runs))
    rows.sort(key=lambda row: (row[0], row[3] != "a trainer"))
    head = ("package", "versions", "what breaks", "reached by", "smallest input", "known", "last reproduced")
    runs = [
        (*_split(run.peer), run.adapter.partition(":")[2], run.held, len(stored.of(run.peer, run.adapter)), run.cases)
        for run in stored.runs
    ]
    return [
        *table(head, rows),
        "",
        *table(("package", "version", "adapter", "laws held", "broken", "cases"), runs),
        "",
        "Laws broken by rounding alone, which the second table counts too (see *What it does not unify*):",
        "",
        *rounding,
    ]


def _row(package: str, fault: Fault, own: Sequence[Entry], runs: Sequence[Run]) -> tuple[str, ...]:
    peers = list(dict.fromkeys(each.peer for each in own))
    last = max((run for run in runs if run.peer in peers), key=lambda run: (run.date, peers.index(run.peer)))
    smallest = min((each.lengths for each in own), key=lambda lengths: (len(lengths), sum(lengths)))
    known = f"[upstream]({fault.known})" if fault.known else "found here"
    if fault.finding:
        known += f", [report](tests/peers/findings/{fault.finding})"
    return (
        package,
        ", ".join(_split(peer)[1] for peer in peers),
        fault.what,
        "a trainer" if fault.reach == "trainer" else "a call",
        f"lengths {' '.join(map(str, smallest))}",
        known,
        f"{last.date}, transformers {last.versions['transformers']}, torch {last.versions['torch']}",
    )


def _split(peer: str) -> tuple[str, str]:
    name, _, version = peer.partition("==")
    return name, version
