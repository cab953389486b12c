"""Mutation testing: the code is changed a little, everywhere, and some test must notice.

python -m tests.mutation            runs mutmut, then holds its survivors against survivors.json
python -m tests.mutation --report   only holds them against it

A survivor is either killed by a new test or explained in survivors.json: one by one, or by a pattern where many
survive for one reason. An explanation that explains nothing any more is stale, and fails like a survivor without one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SURVIVORS = Path(__file__).with_name("survivors.json")
DEAD = ("killed", "timeout", "suspicious", "segfault")


@dataclass(frozen=True)
class Mutant:
    """where: module and function. was, now: the lines that differ. status: mutmut's word."""

    where: str
    was: str
    now: str
    status: str

    def __str__(self) -> str:
        return f"{self.where}: {self.status}\n  - {self.was}\n  + {self.now}"


@dataclass
class Explanations:
    """alike: patterns (where, was, now: regular expressions). single: one mutant each. Both with a reason."""

    alike: list[dict[str, str]] = field(default_factory=list)
    single: list[dict[str, str]] = field(default_factory=list)

    def of(self, mutant: Mutant) -> dict[str, str] | None:
        """The explanation of a survivor, if there is one."""
        for told in self.single:
            if (told["where"], told["was"], told["now"]) == (mutant.where, mutant.was, mutant.now):
                return told
        for told in self.alike:
            parts = (("where", mutant.where), ("was", mutant.was), ("now", mutant.now))
            if all(re.search(told.get(name, ""), text) for name, text in parts):
                return told
        return None


def mutants() -> Iterator[Mutant]:
    """All mutants that mutmut has a verdict on."""
    from mutmut.__main__ import SourceFileMutationData, status_by_exit_code, walk_mutatable_files
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        for name, code in data.exit_code_by_key.items():
            status = status_by_exit_code[code]
            where = re.sub(r"__mutmut_\d+$", "", name)
            was = now = ""
            if status not in (*DEAD, "not checked"):
                lines = get_diff_for_mutant(name, path=data.path).splitlines()
                was, now = (_side(lines, sign) for sign in "-+")
            yield Mutant(where, was, now, status)


def _side(lines: Sequence[str], sign: str) -> str:
    own = [line[1:].strip() for line in lines if line.startswith(sign) and not line.startswith(sign * 3)]
    return " ".join(own)


def judged(found: Sequence[Mutant], told: Explanations) -> tuple[list[str], int]:
    """The lines to print, and the exit status."""
    lines, used, unexplained = [], [], 0
    by_file = Counter((mutant.where.rpartition(".")[0], mutant.status in DEAD) for mutant in found)
    for module in sorted({module for module, _ in by_file}):
        dead, alive = by_file[module, True], by_file[module, False]
        lines.append(f"{module:24} killed {dead:4} of {dead + alive:4}  {dead / (dead + alive):6.1%}")
    for mutant in found:
        if mutant.status in DEAD:
            continue
        why = told.of(mutant)
        if why is None:
            unexplained += 1
            lines.append(f"NOT EXPLAINED {mutant}")
        else:
            used.append(why)
    stale = [each for each in [*told.alike, *told.single] if each not in used]
    lines += [f"STALE {each}" for each in stale]
    dead = sum(mutant.status in DEAD for mutant in found)
    lines.append(
        f"MUTANTS killed {dead} of {len(found)} ({dead / max(1, len(found)):.1%}); of {len(found) - dead} survivors "
        f"{len(used)} explained, {unexplained} not; {len(stale)} explanations stale"
    )
    return lines, int(bool(unexplained or stale or not found))


def main() -> int:
    """Returns 1 if a survivor or an explanation stands alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--report", action="store_true", help="do not run mutmut again")
    parser.add_argument("names", nargs="*", help="mutants to run, as mutmut names them; all if none")
    given = parser.parse_args()
    if not given.report:
        subprocess.run(["mutmut", "run", *given.names], check=False)
    found = [mutant for mutant in mutants() if mutant.status != "not checked"]
    lines, status = judged(found, Explanations(**json.loads(SURVIVORS.read_text(encoding="utf-8"))))
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
