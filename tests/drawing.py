"""Cases that Hypothesis draws, as a list: the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from oracle.case import Case

# What cases may have, by name: in which share of them at least, and whether one has it.
Features = dict[str, tuple[float, Callable[[Case], bool]]]


def drawn(strategy: SearchStrategy[Case], count: int, of: int = 0) -> list[Case]:
    """The first ``count`` cases of the seed ``of``."""
    found: list[Case] = []

    @seed(of)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def check_features(features: Features, cases: list[Case]) -> None:
    """Every feature is in as many of the cases as its floor asks."""
    low = []
    for feature, (floor, has) in features.items():
        share = sum(map(has, cases)) / len(cases)
        if share < floor:
            low.append(f"{feature}: {share:.3f} of {len(cases)} cases, floor {floor}")
    assert not low, "; ".join(low)
