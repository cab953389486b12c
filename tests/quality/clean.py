"""No false alarms: 100,000 cases of the right implementation, recorded law by law in clean.json.

python -m tests.quality.clean             runs the laws whose record is older than they are, and stores it
python -m tests.quality.clean --anew      runs all of them
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import oracle
from impl import PaddingFree
from oracle.laws import LAWS, Law
from oracle.suite import shares, try_law, versions
from tests.measuring import stamp, workers

CASES = 100_000
RECORD = Path(__file__).with_name("clean.json")
ORACLE = Path(oracle.__file__).parent


@dataclass(frozen=True)
class Clean:
    """One law's record. digest: of what it says and of what it draws."""

    cases: int
    alarms: int
    date: str
    commit: str
    versions: dict[str, str]
    seed: int
    digest: str


def digest(law: Law) -> str:
    """Of the law's module and the strategies, comments and line breaks left out."""
    files = [ORACLE / "laws" / f"{law.family}.py", ORACLE / "strategies.py"]
    told = "".join(ast.dump(ast.parse(path.read_text(encoding="utf-8"))) for path in files)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def load() -> dict[str, Clean]:
    """The stored record, by law."""
    raw: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return {title: Clean(**record) for title, record in raw.items()}


def stale(record: dict[str, Clean]) -> list[Law]:
    """Laws that are newer than their record, or have none."""
    return [law for law in LAWS if law.title not in record or record[law.title].digest != digest(law)]


def run(title: str, cases: int, seed: int) -> tuple[str, int, str]:
    """The cases that one law tried on the right implementation, and its alarm, or nothing."""
    law = next(law for law in LAWS if law.title == title)
    result = try_law(law, PaddingFree(), "qwen3", cases, seed)
    told = "" if result.finding is None else f"{result.finding.summary} {result.finding.case.to_json()}"
    return title, result.cases, told


def main() -> int:
    """Returns 1 if there was an alarm."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.clean", description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=datetime.now(UTC).toordinal())
    parser.add_argument("--anew", action="store_true")
    given = parser.parse_args()
    wanted = shares(LAWS, given.cases)
    record = {} if given.anew else load()
    # The longest first, so that no core waits at the end.
    waiting = sorted(stale(record), key=lambda law: ("step" not in str(law.surfaces), -wanted[law.title]))
    alarms = 0
    with workers() as pool:
        laws = {law.title: law for law in waiting}
        pending = [pool.submit(run, title, wanted[title], given.seed) for title in laws]
        for done in as_completed(pending):
            title, cases, alarm = done.result()
            alarms += bool(alarm)
            print(f"{title}: {cases} cases{', ALARM ' + alarm if alarm else ''}", flush=True)
            told = {"versions": versions(), "seed": given.seed, "digest": digest(laws[title])}
            record[title] = Clean(cases, int(bool(alarm)), **stamp(), **told)
            ordered = {law.title: asdict(record[law.title]) for law in LAWS if law.title in record}
            RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    print(f"CLEAN {sum(each.cases for each in record.values())} cases, {alarms} alarms")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
