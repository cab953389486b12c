"""The pool of processes: what it says of ranks that raise, hang, die or decline, and that it lives on."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from impl import PaddingFree
from oracle import ranks
from oracle.case import Mesh, from_lengths
from oracle.laws import LAWS
from oracle.ranks import RankDeclinedError, RankError, RankHangError, over_mesh, pool
from oracle.suite import Status, try_law
from tests.faults.sharded import FirstRankWaits, SecondRankRaises

CASE = from_lengths([[2, 1, 1], [1, 3]], mesh=Mesh(ulysses=2))
RING = next(law for law in LAWS if law.name == "a_ring_equals_one_process")


class Declines(PaddingFree):
    def sharded_step(self, *arguments: Any) -> SimpleNamespace:
        raise NotImplementedError


class SecondRankDies(PaddingFree):
    def sharded_step(self, model: Any, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        if ranks.dist.get_rank(groups.world) == 1:
            os._exit(3)
        return super().sharded_step(model, case, groups, streaming)


def test_a_hang_is_told_and_the_next_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    over_mesh(PaddingFree(), CASE)
    monkeypatch.setattr(ranks, "CASE_SECONDS", 3.0)
    with pytest.raises(RankHangError, match=r"ranks \[.*\] of 2 gave no answer in 3 s: they hang"):
        over_mesh(FirstRankWaits(), CASE)
    monkeypatch.undo()
    assert len(over_mesh(PaddingFree(), CASE)) == 2


def test_a_law_reports_a_hang_once_and_does_not_shrink_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CASE_SECONDS", 3.0)
    result = try_law(RING, FirstRankWaits(), "qwen3", 5)
    assert (result.status, result.cases) == (Status.BROKEN, 1)
    assert result.finding is not None
    assert "they hang" in result.finding.summary
    assert "ring" in result.finding.details[0]


def test_a_rank_that_raises_is_named_at_once() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 raised ValueError: the second rank has had enough"):
        over_mesh(SecondRankRaises(), CASE)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 died"):
        over_mesh(SecondRankDies(), CASE)


def test_declining_costs_no_new_pool() -> None:
    over_mesh(PaddingFree(), CASE)
    before = pool()
    with pytest.raises(RankDeclinedError):
        over_mesh(Declines(), CASE)
    assert pool() is before
    assert try_law(RING, Declines(), "qwen3", 3).status is Status.NOT_OFFERED


def test_every_rank_has_the_same_loss_and_averaged_gradients() -> None:
    for mesh in (Mesh(2, 2), Mesh(2, data=2), Mesh(ring=2, data=2), Mesh(ring=2)):
        results = over_mesh(PaddingFree(), from_lengths([[2, 1, 1], [1, 3]], mesh=mesh))
        assert len(results) == mesh.ranks
        assert len({float(result.loss) for result in results}) == 1
        for name, gradient in results[0].gradients.items():
            assert all(result.gradients[name].equal(gradient) for result in results), name
        counts = [3, 2] if mesh.data == 2 else [5]
        assert [len(result.embeddings) for result in results] == [n for n in counts for _ in range(mesh.sharing)]
