"""The report's page: all that other commands left behind, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oracle.__main__ import main
from oracle.page import Sources, html, markdown
from tests.faults.matrix import STORED


def record(date: str, ours: float) -> dict[str, Any]:
    """One night's, as pytest-benchmark writes it, shortened."""
    timed = {"workload": "W1", "sequences": 516, "tokens": 2029, "dtype": "torch.float32", "backward": True}
    timed["limits"] = {"ours": ours, "padded": 9.25}
    timed["left out"] = {"transformers packed": "a mask of 9 x 9"}
    forms = {
        form: {"512": {"mib": 1.0, "s": 2.0}, "2048": {"mib": 4.0, "s": 9.0}} for form in ("plain", "chunks of 64")
    }
    return {
        "datetime": f"{date}T02:00:00",
        "commit_info": {"id": "0123456789abcdef"},
        "machine_info": {"cpu": {"brand_raw": "Some CPU"}, "threads": 1, "torch": "2.13.0", "transformers": "5.24.0"},
        "benchmarks": [
            {"extra_info": timed},
            {"extra_info": {"growth": {"of": "loss", "forms": forms}}},
            {"extra_info": {"microseconds a token": {"64": 500.0, "4096": 520.0}}},
            {"extra_info": {"raggedness": {"0.0": {"ours": 1.1, "padded": 1.1}, "1.0": {"ours": 1.2, "padded": 4.0}}}},
        ],
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """A run that broke a law, the stored matrix, two nights."""
    folder = tmp_path_factory.mktemp("report")
    check = folder / "check.json"
    status = main(["check", "tests.faults.founding:StrictDecrease", "--examples", "50", "--json", str(check)])
    assert status == 1
    nights = folder / "nights"
    nights.mkdir()
    for date, ours in (("2026-11-29", 1.25), ("2026-11-30", 1.31)):
        (nights / f"{date}.json").write_text(json.dumps(record(date, ours)))
    return Sources(check, STORED, nights)


def test_the_page_shows_every_part(sources: Sources) -> None:
    page = html(sources)
    assert "<title>VERDICT exact: 49 laws, 1 broken" in page
    assert "boundaries.lengths_are_recovered" in page
    assert "as found   |0 0|  lengths [2]" in page
    assert page.count('<span class="even">0</span><span class="odd">0</span>') == 1, "the stream of two sequences"
    assert re.search(r"KILLED (\d+) of \1 planted faults", page)
    assert "allclose, random lengths 1 to 64" in page
    assert "2026-11-30, commit 01234567, Some CPU, 1 thread(s), torch 2.13.0" in page
    assert "<td>W1, float32, forward and backward; 516 sequences, 2,029 tokens</td>" in page
    assert '<td class="number">1.31</td>' in page
    assert "<li>transformers packed, W1: a mask of 9 x 9</li>" in page
    for title in (
        "A token&#39;s time as the batch grows",
        "Time over the limit&#39;s as lengths grow more uneven",
        "Loss, forward and backward: MiB beyond the inputs",
        "Loss, forward and backward: seconds",
        "Ours over the limit, night after night",
    ):
        assert re.search(f"<figcaption>{title}</figcaption><svg", page), title
    uneven = page.split("grow more uneven</figcaption>")[1].split("</svg>")[0]
    assert re.search(r"<text[^>]*>2</text>", uneven), "numbers at the minor ticks, for there is hardly another"


def test_the_page_needs_nothing_else(sources: Sources) -> None:
    page = re.sub(r"<!--.*?-->|xmlns(:\w+)?=\"[^\"]*\"", "", html(sources))
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|src=|https?://", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    nothing = Sources(tmp_path / "check.json", tmp_path / "matrix.json", tmp_path)
    page = html(nothing)
    for told in ("No verdict is on file", "python -m oracle check --all --json", "nox -s faults", "nox -s bench"):
        assert told in page
    assert markdown(nothing).startswith("# No verdict is on file")


def test_the_command_it_names_works_where_nothing_has_run_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status = main(["check", "tests.faults.founding:StrictDecrease", "--examples", "5", "--json", ".oracle/check.json"])
    assert status == 1
    assert main(["report"]) == 0
    assert "VERDICT exact" in Path(".oracle/report.html").read_text()


def test_text_is_escaped(sources: Sources, tmp_path: Path) -> None:
    report = json.loads(sources.check.read_text())
    report["implementation"] = "<b>mine</b>"
    (tmp_path / "check.json").write_text(json.dumps(report))
    page = html(Sources(tmp_path / "check.json", STORED, tmp_path / "none"))
    assert "&lt;b&gt;mine&lt;/b&gt;" in page
    assert "<b>mine" not in page


def test_markdown_for_a_jobs_summary(sources: Sources) -> None:
    text = markdown(sources)
    assert "| boundaries.lengths_are_recovered | BROKEN | 1 |" in text
    assert "| W1, float32, forward and backward; 516 sequences, 2,029 tokens | 1.31 | 9.25 |" in text
    assert "* Left out: transformers packed, W1: a mask of 9 x 9" in text
    assert "| this suite |" in text


def test_the_command_writes_both(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--check", str(sources.check), "--matrix", str(STORED), "--benchmarks", str(sources.benchmarks)]
    target = tmp_path / "new" / "report.html"
    assert main(["report", *where, "--html", str(target), "--markdown", str(tmp_path / "report.md")]) == 0
    assert target.read_text() == html(sources)
    assert (tmp_path / "report.md").read_text() == markdown(sources)
    assert f"REPORT {target}" in capsys.readouterr().out
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["report", *where, "--html", str(target)]) == 0
    assert summary.read_text() == "before\n" + markdown(sources)
