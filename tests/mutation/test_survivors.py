"""How survivors are held against their explanations."""

from __future__ import annotations

import json

from tests.mutation.__main__ import SURVIVORS, Explanations, Mutant, judged

DEAD = Mutant("impl.packing.x_pack", "", "", "killed")
ALIVE = Mutant("impl.packing.x_pack", "a = 1", "a = 2", "survived")


def test_a_survivor_without_an_explanation_fails_and_is_shown() -> None:
    lines, status = judged([DEAD, ALIVE], Explanations())
    assert status == 1
    assert "NOT EXPLAINED impl.packing.x_pack: survived\n  - a = 1\n  + a = 2" in lines
    assert lines[-1].startswith("MUTANTS killed 1 of 2 (50.0%); of 1 survivors 0 explained, 1 not")


def test_one_is_explained_by_itself_or_by_a_pattern() -> None:
    single = {"where": ALIVE.where, "was": ALIVE.was, "now": ALIVE.now, "why": "no difference"}
    assert judged([DEAD, ALIVE], Explanations(single=[single]))[1] == 0
    assert judged([DEAD, ALIVE], Explanations(alike=[{"was": r"^a = ", "why": "no difference"}]))[1] == 0


def test_an_explanation_that_explains_nothing_is_stale() -> None:
    lines, status = judged([DEAD], Explanations(alike=[{"was": "gone", "why": "no difference"}]))
    assert status == 1
    assert any(line.startswith("STALE") for line in lines)


def test_nothing_measured_is_no_success() -> None:
    assert judged([], Explanations())[1] == 1


def test_every_explanation_says_why() -> None:
    told = Explanations(**json.loads(SURVIVORS.read_text(encoding="utf-8")))
    assert all(len(each["why"]) > 20 for each in [*told.alike, *told.single])
