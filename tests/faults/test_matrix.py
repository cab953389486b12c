"""The kill matrix as it is stored and published: of this catalogue, and written by the measurement alone."""

from __future__ import annotations

import statistics
from itertools import pairwise
from unittest import mock

import pytest

from impl import PaddingFree
from oracle.laws import LAWS
from oracle.suite import shares
from tests.faults import matrix, styles, trial
from tests.faults.catalogue import Fault, catalogue
from tests.measuring import read_part

FAULTS = {fault.id: fault for fault in catalogue()}


def test_the_stored_matrix_is_of_this_catalogue_and_has_no_survivor() -> None:
    stored = matrix.load()
    told = {(row.fault, row.sentence, row.url, row.model) for row in stored.rows}
    assert told == {(fault.id, fault.sentence, fault.url, fault.model) for fault in FAULTS.values()}, (
        "nox -s faults -- --write measures it anew"
    )
    assert stored.survivors == []
    assert stored.seeds == trial.SEEDS
    assert {law for row in stored.rows for law in row.laws} <= {law.title for law in LAWS} | {trial.CANARY}


def test_readme_and_table_are_the_stored_matrix_and_nothing_else() -> None:
    stored = matrix.load()
    published = read_part(matrix.README.read_text(encoding="utf-8"), matrix.BEGIN, matrix.END)
    assert published == "\n".join(matrix.summary(stored)).strip()
    assert matrix.TABLE.read_text(encoding="utf-8") == "\n".join(matrix.full(stored))


def test_the_suite_kills_more_than_any_style() -> None:
    stored = matrix.load()
    for style in styles.STYLES:
        assert sum(row.styles[style.name] for row in stored.rows) < len(stored.rows) - len(stored.survivors)


@pytest.mark.parametrize("identity", ["strict-decrease", "unpadded-slices", "half-gradient"])
def test_a_fault_dies_as_often_and_as_soon_as_published(identity: str) -> None:
    row = next(row for row in matrix.load().rows if row.fault == identity)
    kills = [trial.first_kill(FAULTS[identity], seed)[0] for seed in range(3)]
    assert all(kill is not None for kill in kills)
    examples = statistics.median([kill.examples for kill in kills if kill])
    assert examples <= 2 * row.p95 + 10


def test_laws_take_turns_by_their_shares() -> None:
    turns = trial.schedule()
    wanted = shares(LAWS, trial.EXAMPLES)
    for law in LAWS:
        own = [at for at, (each, _) in enumerate(turns) if each is law]
        assert len(own) == wanted[law.title]
        assert [k for each, k in turns if each is law] == list(range(len(own)))
        assert max((b - a for a, b in pairwise(own)), default=0) <= 1.5 * len(turns) / len(own) + len(LAWS)


class Renamed(PaddingFree):
    """Nothing is wrong."""

    name = "renamed"


def test_an_implementation_without_a_fault_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed, so no law is left out: each of the first turns is really taken."""
    assert trial.changed(Renamed) == set()
    begun = trial.schedule()[:100]
    monkeypatch.setattr(trial, "schedule", lambda: begun)
    with mock.patch.object(trial, "judge", wraps=trial.judge) as judge:
        assert trial.first_kill(Fault(Renamed, ("none",)), 0) == (None, None)
    assert judge.call_count == len(begun)


def test_a_law_is_left_out_only_where_it_calls_nothing_that_was_changed() -> None:
    by_title = {law.title: law for law in LAWS}
    boundaries, infonce = (
        by_title[title] for title in ("boundaries.lengths_are_recovered", "losses.infonce_equals_its_definition")
    )
    assert trial.touched(FAULTS["tail-slots-counted"], boundaries)
    assert not trial.touched(FAULTS["tail-slots-counted"], infonce)
    assert trial.touched(FAULTS["sum-over-groups"], infonce)
    assert not trial.touched(FAULTS["sum-over-groups"], boundaries)
    assert trial.touched(FAULTS["reference-pools-the-second-last"], boundaries)


@pytest.mark.parametrize("style", styles.STYLES, ids=lambda style: style.name)
def test_a_style_can_be_discontent(style: styles.Style) -> None:
    assert styles.caught(style, FAULTS["no-boundaries-in-attention"])
