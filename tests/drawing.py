"""Cases that Hypothesis draws, as a list: the same for the same seed."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from oracle.case import Case


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
