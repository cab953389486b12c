"""The benchmarks' own arithmetic: turns, and ratios round against round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import against
from tests.benchmarks.interleaved import Times, interleaved


def test_each_round_begins_with_another_and_warm_ups_do_not_count() -> None:
    ran: list[str] = []
    times = interleaved({name: lambda name=name: ran.append(name) for name in "abc"}, rounds=3)  # type: ignore[misc]
    assert "".join(ran) == "abcbcacababc"
    assert {name: len(each) for name, each in times.seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert times.peak == {"a": 0, "b": 0, "c": 0}


def test_a_ratio_is_the_middle_of_the_rounds() -> None:
    """A machine that was busy for one round slows both sides of it."""
    times = Times({"ours": [1, 10, 3], "dense": [1, 5, 1], "attention": [1, 5, 1]}, {})
    assert times.ratio("ours", "dense", "attention") == 1.0
    assert times.ratio("ours", "dense") == 2.0
    assert times.median("ours") == 3


def test_rounds_of_unequal_number_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Times({"a": [1, 2], "b": [1]}, {}).ratio("a", "b")


class Paced:
    """A side that takes so long; its first turn, which warms it up, far longer."""

    def __init__(self, slow: dict[str, float]) -> None:
        self._slow = slow
        self._warm: set[str] = set()

    def seconds(self, work: str) -> float:
        first = work not in self._warm
        self._warm.add(work)
        return 100.0 if first else self._slow.get(work, 1.0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("slow", "status"), [({}, 0), ({"W3 forward": 1.08}, 0), ({"W3 forward": 1.3}, 1)])
def test_slower_than_another_commit_by_more_than_the_limit_fails(
    slow: dict[str, float], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = iter([Paced({}), Paced(slow)])  # base, then head
    monkeypatch.setattr(against, "Side", lambda tree: next(sides))
    monkeypatch.setattr(against, "unpacked", lambda reference, folder: folder)
    monkeypatch.setattr("sys.argv", ["against", "v1", "--rounds", "3"])
    assert against.main() == status
    told = capsys.readouterr().out
    assert ("W3 forward      1.30 times v1's time  SLOWER" in told) == bool(status)
    assert f"AGAINST v1: {status} of 5 slower than 1.1 times" in told


# A time limit ends a test by pytest.fail, which is no Exception.
BROKEN_OFF = """
import pytest


def test_whole(benchmark):
    benchmark.pedantic(lambda: None, rounds=2)


def test_broken_off(benchmark):
    benchmark.pedantic(lambda: pytest.fail('too long'), rounds=2)
"""


def test_a_broken_off_benchmark_does_not_take_the_others_record_with_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.benchmarks.conftest import pytest_benchmark_generate_json\n")
    (tmp_path / "test_two.py").write_text(BROKEN_OFF)
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-json=record.json", "-p", "no:randomly", "."]
    root = Path(__file__).resolve().parents[2]
    # A benchmark that knows of pytest-xdist times nothing and writes no record.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(root)
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert [each["name"] for each in record["benchmarks"]] == ["test_whole"]
