"""The benchmarks' own arithmetic: turns, and ratios round against round."""

from __future__ import annotations

import pytest

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
