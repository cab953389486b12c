"""Runs the laws on an implementation: draws cases, shrinks what fails, collects a report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.errors
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import ExampleDatabase

from oracle import reference
from oracle.case import Case, Rows, from_lengths
from oracle.contract import HarnessError, declines, offers, own_line
from oracle.exact import ExactError, exact
from oracle.laws import LAWS, Broken, HangError, Law, VacuousError
from oracle.models import tiny
from oracle.numeric import law_of
from oracle.outcome import compare

Progress = Callable[[Law, int], None]

COUNTEREXAMPLES = Path(".oracle")


class Status(StrEnum):
    """How a law fared."""

    HOLDS = "holds"
    BROKEN = "BROKEN"
    NOT_OFFERED = "not offered"
    DECLINED = "declined all"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Finding:
    """A broken law's smallest case, and what it showed."""

    law: str
    summary: str
    details: list[str]
    case: Case


@dataclass(frozen=True)
class LawResult:
    """One law's outcome: cases tried until all held or the first broke, and the time taken.

    declined: cases among them for which the implementation raised NotImplementedError.
    """

    law: str
    sentence: str
    status: Status
    cases: int = 0
    seconds: float = 0.0
    finding: Finding | None = None
    declined: int = 0


@dataclass
class Report:
    """Everything a reader needs to know of one run."""

    implementation: str
    model: str
    seed: int
    results: list[LawResult] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    backends: dict[str, int] = field(default_factory=dict)
    bits: float = 0.0
    level: str = "exact"

    def count(self, status: Status) -> int:
        """Laws with this status."""
        return sum(result.status is status for result in self.results)

    @property
    def verdict(self) -> str:
        """The last line of every run."""
        drawn = sum(result.cases for result in self.results)
        seconds = sum(result.seconds for result in self.results)
        absent = self.count(Status.NOT_OFFERED)
        unrun = self.count(Status.NOT_RUN)
        rest = f", {unrun} not run" if unrun else ""
        declined = sum(result.declined for result in self.results)
        rest += f", {declined} cases declined" if declined else ""
        return (
            f"VERDICT {self.level}: {len(self.results)} laws, {self.count(Status.BROKEN)} broken, "
            f"{absent} not offered{rest}, {drawn} cases, {seconds:.0f} s"
        )

    def to_json(self) -> str:
        """Machine-readable, counter-examples as cases."""
        return json.dumps(asdict(self) | {"verdict": self.verdict}, indent=2)


def canary(model: str) -> float:
    """Two equal runs of the reference, and any two paddings, agree in every bit; the bits they needed.

    Raises HarnessError otherwise: then nothing below would mean anything.
    """
    case, small = from_lengths([[3, 1, 7], [1, 1], [5, 2, 1, 1]], model=model), tiny(model)
    with exact() as arithmetic:
        first = reference.step(small, case, Rows())
        for layout in (Rows(), Rows("left", 3, 1), None):
            difference = compare(first, reference.step(small, case, layout))
            if difference:
                raise HarnessError(f"the reference disagrees with itself under {layout}: {difference}")
    return arithmetic.bits


def versions() -> dict[str, str]:
    """What a report names beside the implementation."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hypothesis": hypothesis.__version__,
        "device": "cpu",
    }


def describe(implementation: Any) -> str:
    """The implementation's name and version."""
    kind = type(implementation)
    name = getattr(implementation, "name", f"{kind.__module__}.{kind.__qualname__}")
    version = getattr(implementation, "__version__", None)
    return f"{name} {version}" if version else str(name)


def shares(laws: Sequence[Law], examples: int) -> dict[str, int]:
    """How many of ``examples`` cases each law draws."""
    whole = sum(law.share for law in laws)
    return {law.title: max(1, round(examples * law.share / whole)) for law in laws}


def check(
    implementation: Any,
    model: str = "qwen3",
    examples: int = 1600,
    seed: int = 0,
    stop_at_first: bool = True,
    progress: Progress | None = None,
    dtype: str | None = None,
) -> Report:
    """Tries every law on the implementation; with ``dtype`` the one of that precision instead.

    Args:
        implementation: see ``oracle.contract.Implementation``.
        examples: cases drawn in all; laws without a model get most of them.
        seed: reproduces the run.
        stop_at_first: leave the laws after the first broken one untried.
        progress: called after each case with the law and its count.
        dtype: "float32", "bfloat16" or "float16": see ``oracle.numeric``.
    """
    laws = LAWS if dtype is None else [law_of(dtype)]
    report = Report(describe(implementation), model, seed, versions=versions(), level=dtype or "exact")
    report.bits = canary(model)
    wanted = shares(laws, examples)
    for law in laws:
        if not any(offers(implementation, surface) for surface in law.surfaces):
            report.results.append(LawResult(law.title, law.sentence, Status.NOT_OFFERED))
        elif stop_at_first and report.count(Status.BROKEN):
            report.results.append(LawResult(law.title, law.sentence, Status.NOT_RUN))
        else:
            report.results.append(try_law(law, implementation, model, wanted[law.title], seed, progress))
    backends = getattr(implementation, "backends", None)
    report.backends = backends() if callable(backends) else {}
    return report


def try_law(
    law: Law,
    implementation: Any,
    model: str,
    examples: int,
    seed: int = 0,
    progress: Progress | None = None,
    database: ExampleDatabase | None = None,
) -> LawResult:
    """One law on drawn cases; the first failure is shrunk to a smallest case.

    ``database`` keeps failing cases between runs and tries them first.
    """
    tried = declined = 0
    failed: Case | None = None

    def every_case(case: Case) -> None:
        nonlocal tried, declined, failed
        tried += failed is None
        if progress:
            progress(law, tried)
        try:
            judge(law, implementation, case)
        except NotImplementedError:
            declined += 1
        except Broken as broken:
            failed = case
            if isinstance(broken, HangError):
                raise _NotShrunkError(broken) from broken
            raise

    # Stored examples are kept by the function's name.
    every_case.__name__ = re.sub(r"\W", "_", f"{law.family}_{law.name}_{model}")
    configured = settings(
        max_examples=examples,
        deadline=None,
        database=database,
        report_multiple_bugs=False,
        print_blob=False,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run = hypothesis.seed(seed)(configured(given(law.strategy(model))(every_case)))

    start, found = time.perf_counter(), None
    try:
        with redirect_stdout(StringIO()):  # Hypothesis reports its own way; we report ours
            run()
    except (Broken, hypothesis.errors.Flaky, _NotShrunkError) as error:
        assert failed is not None
        broken = error.broken if isinstance(error, _NotShrunkError) else error
        if not isinstance(broken, Broken):
            broken = Broken("the same case gives different results when run again")
        found = Finding(law.title, broken.summary, broken.details, failed)
    status = Status.BROKEN if found else Status.DECLINED if declined == tried else Status.HOLDS
    return LawResult(law.title, law.sentence, status, tried, time.perf_counter() - start, found, declined)


class _NotShrunkError(BaseException):
    """Passes Hypothesis by, which shrinks exceptions alone."""

    def __init__(self, broken: Broken):
        self.broken = broken


def judge(law: Law, implementation: Any, case: Case) -> None:
    """The law on one case: returns, or raises Broken.

    What an implementation raises of its own breaks the law too, unless it declines the case with
    NotImplementedError; what exact arithmetic or the suite raises is nobody's verdict and goes on up, with the
    law, the case and the line that met it.
    """
    try:
        law.check(implementation, case)
    except (Broken, HarnessError, VacuousError):
        raise
    except ExactError as error:
        raise type(error)(f"{error} Met by {law.title} on lengths {case.lengths}, {own_line(error)}") from error
    except Exception as error:
        if declines(error):
            raise
        details = [own_line(error), f"lengths {case.lengths}"]
        raise Broken(f"raised {type(error).__name__}: {error}", details) from error


def save(finding: Finding, implementation: str, folder: Path = COUNTEREXAMPLES) -> Path:
    """Writes a counter-example as JSON, for ``python -m oracle replay``; returns the file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{finding.law}.json"
    content = {"law": finding.law, "implementation": implementation, "case": json.loads(finding.case.to_json())}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return path
