"""The pool of processes: what it says of ranks that raise, hang, die or decline, and that it lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from impl import PaddingFree, distributed, sharding
from oracle import ranks
from oracle.case import Mesh, from_lengths
from oracle.exact import UnknownOperatorError
from oracle.laws import LAWS
from oracle.ranks import RankDeclinedError, RankError, RankHangError, over_mesh, pool
from oracle.suite import Status, try_law
from tests.faults.shards import FirstRankWaits, SecondRankRaises

ROOT = Path(__file__).resolve().parents[2]
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


class FirstRankDeclines(PaddingFree):
    """While the others wait for it."""

    def sharded_step(self, model: Any, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        if ranks.dist.get_rank(groups.world) == 0:
            raise NotImplementedError
        return super().sharded_step(model, case, groups, streaming)


class DeclinesAndRaises(PaddingFree):
    def sharded_step(self, model: Any, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        if ranks.dist.get_rank(groups.world) == 0:
            raise NotImplementedError
        raise ValueError("the real reason")


class DeclinesLongTexts(PaddingFree):
    """By its own batch, so that with two batches one may decline while the other waits."""

    def sharded_step(self, model: Any, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        if max(case.lengths) > 2:
            raise NotImplementedError
        return super().sharded_step(model, case, groups, streaming)


class TorchDeclines(PaddingFree):
    """Torch's own NotImplementedError is an error, not a refusal."""

    def sharded_step(self, *arguments: Any) -> SimpleNamespace:
        return torch.nn.Module()(1)


class NoRule(PaddingFree):
    def sharded_step(self, model: Any, *arguments: Any) -> SimpleNamespace:
        return torch.cumprod(torch.ones(3, dtype=torch.float64), 0)  # type: ignore[return-value]


class LeavesTheModelChanged(PaddingFree):
    def sharded_step(self, model: Any, *arguments: Any) -> SimpleNamespace:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        raise ValueError("and now for something else")


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
    assert try_law(RING, Declines(), "qwen3", 3).status is Status.DECLINED


def test_every_rank_has_the_same_loss_and_averaged_gradients() -> None:
    for mesh in (Mesh(2, 2), Mesh(2, data=2), Mesh(ring=2, data=2), Mesh(ring=2)):
        results = over_mesh(PaddingFree(), from_lengths([[2, 1, 1], [1, 3]], mesh=mesh))
        assert len(results) == mesh.ranks
        assert len({float(result.loss) for result in results}) == 1
        for name, gradient in results[0].gradients.items():
            assert all(result.gradients[name].equal(gradient) for result in results), name
        counts = [3, 2] if mesh.data == 2 else [5]
        assert [len(result.embeddings) for result in results] == [n for n in counts for _ in range(mesh.sharing)]


@pytest.mark.parametrize("implementation", [DeclinesAndRaises(), TorchDeclines(), FirstRankDeclines()])
def test_an_error_or_a_lone_refusal_is_not_taken_for_declining(implementation: PaddingFree) -> None:
    expected = {
        "DeclinesAndRaises": "rank 1 of 2 raised ValueError: the real reason",
        "TorchDeclines": 'raised NotImplementedError: Module .* is missing the required "forward" function',
        "FirstRankDeclines": r"ranks \[0\] of 2 raised NotImplementedError, others of their batch did not",
    }
    with pytest.raises(RankError, match=expected[type(implementation).__name__]) as caught:
        over_mesh(implementation, CASE)
    assert not isinstance(caught.value, RankDeclinedError)
    assert len(over_mesh(PaddingFree(), CASE)) == 2


def test_a_batch_may_be_declined_while_another_waits() -> None:
    case = from_lengths([[1, 1, 1], [1, 3]], mesh=Mesh(ulysses=2, data=2))
    with pytest.raises(RankDeclinedError):
        over_mesh(DeclinesLongTexts(), case)
    assert len(over_mesh(PaddingFree(), case)) == 4


def test_an_operator_without_a_rule_is_nobodys_verdict_in_a_rank_either() -> None:
    with pytest.raises(UnknownOperatorError, match="cumprod"):
        over_mesh(NoRule(), CASE)
    with pytest.raises(UnknownOperatorError, match="cumprod"):
        try_law(RING, NoRule(), "qwen3", 2)


def test_nothing_of_a_case_that_failed_is_left_in_the_next() -> None:
    before = over_mesh(PaddingFree(), CASE)
    with pytest.raises(RankError, match="something else"):
        over_mesh(LeavesTheModelChanged(), CASE)
    after = over_mesh(PaddingFree(), CASE)
    assert torch.equal(before[0].embeddings, after[0].embeddings)


def test_a_worker_killed_while_idle_is_replaced() -> None:
    over_mesh(PaddingFree(), CASE)
    children = Path(f"/proc/{pool()._server.pid}/task/{pool()._server.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    time.sleep(0.3)
    assert len(over_mesh(PaddingFree(), CASE)) == 2


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """Even while they hang: what forks them hears that its parent is gone."""
    script = (
        "from tests.oracle.test_ranks import *\n"
        "over_mesh(PaddingFree(), CASE); print(pool()._server.pid, flush=True); over_mesh(FirstRankWaits(), CASE)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        time.sleep(1)
        parent.kill()
    for _ in range(100):
        if not Path(f"/proc/{server}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"process {server} lives on")


def test_a_factor_in_another_place_is_explained() -> None:
    result = try_law(next(law for law in LAWS if law.name == "ulysses_equals_one_process"), FactorAfter(), "qwen3", 8)
    assert result.status is Status.BROKEN
    assert result.finding is not None
    assert "in plain float64 they agree to" in result.finding.details[-1]
    assert "to be offered as streaming_step" in result.finding.details[-1]


class FactorAfter(PaddingFree):
    """The ranks' factor multiplies gradients after backward: right, and rounded elsewhere."""

    def sharded_step(self, model: Any, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        def plain_loss(infonce_loss: Any, embeddings: Any, labels: Any, group: Any) -> Any:
            return infonce_loss(*distributed.gather(embeddings, labels, group.data))

        with mock.patch.object(sharding, "loss", plain_loss):
            made = super().sharded_step(model, case, groups, streaming)
        gradients = {name: gradient * case.mesh.ranks for name, gradient in made.gradients.items()}
        return SimpleNamespace(embeddings=made.embeddings, loss=made.loss, gradients=gradients)
