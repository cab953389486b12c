"""What is said of released packages is complete, and what is not expected is told."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.suite import Report, Status, check
from tests.peers import expectations
from tests.peers.expectations import FOLDER, Entry


class Decreases:
    """A one-token sequence is no decrease: it merges with its neighbour."""

    name = "decreases"

    def boundaries(
        self, position_ids: torch.Tensor | None = None, *, cu_seqlens: torch.Tensor | None = None
    ) -> list[int]:
        """The lengths, by ``position_ids[1:] < position_ids[:-1]``."""
        if position_ids is None or position_ids.dim() > 1:
            raise NotImplementedError
        starts = [0, *(torch.nonzero(position_ids[1:] < position_ids[:-1]).flatten() + 1).tolist(), len(position_ids)]
        return [after - before for before, after in itertools.pairwise(starts)]


FINDINGS = sorted((FOLDER / "findings").glob("*.py"))


def test_every_broken_law_has_a_cause() -> None:
    assert list(expectations.load().gaps()) == []


def test_a_broken_law_without_a_cause_is_a_gap() -> None:
    stored = expectations.load()
    stored.broken[0].fault = ""
    assert [gap for gap in stored.gaps() if "no cause is named" in gap and stored.broken[0].law in gap]


def test_a_bug_that_nobody_reports_is_a_gap() -> None:
    stored = expectations.load()
    name = next(name for name, fault in stored.faults.items() if fault.finding and not fault.known)
    stored.faults[name].finding = ""
    assert [gap for gap in stored.gaps() if gap.startswith(f"the cause {name} is ours to report")]


def test_a_law_that_breaks_unlisted_is_a_surprise(report: Report) -> None:
    law = _broken(report)
    assert [told for told in expectations.surprises({}, report) if told.startswith(f"{law} breaks and is not expected")]


def test_a_listed_law_that_holds_is_a_surprise(report: Report) -> None:
    law = _broken(report)
    expected = {each.law: Entry("p", "a", each.law, "cause", [1], "") for each in report.results if each.finding}
    assert list(expectations.surprises(expected, report)) == []
    mended = [replace(each, status=Status.HOLDS, finding=None) if each.law == law else each for each in report.results]
    told = list(expectations.surprises(expected, replace(report, results=mended)))
    assert told == [f"{law} is expected to break (cause), and: {Status.HOLDS}"]


def test_a_run_that_declines_every_case_is_a_surprise(report: Report) -> None:
    declined = [replace(each, status=Status.DECLINED, finding=None) for each in report.results]
    assert list(expectations.surprises({}, replace(report, results=declined))) == ["every case was declined"]


def test_the_readme_has_the_track_record() -> None:
    text = expectations.README.read_text(encoding="utf-8")
    part = text[text.index(expectations.BEGIN) + len(expectations.BEGIN) : text.index(expectations.END)]
    told = "python -m tests.peers --readme writes it anew"
    assert part.strip() == "\n".join(expectations.track_record(expectations.load())).strip(), told


@pytest.mark.parametrize("script", FINDINGS, ids=lambda script: script.stem)
def test_a_findings_script_needs_nothing_of_ours(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 30, f"{script.name} has {len(lines)} lines"
    assert not [line for line in lines if re.match(r"\s*(import|from) +(oracle|impl|tests)\b", line)]
    assert script.with_suffix(".md").exists(), f"{script.name} has no report"


@pytest.fixture(scope="module")
def report() -> Report:
    """A peer with the founding bug planted, over the laws on boundaries."""
    return check(Decreases(), examples=400, stop_at_first=False)


def _broken(report: Report) -> str:
    return next(each.law for each in report.results if each.finding)
