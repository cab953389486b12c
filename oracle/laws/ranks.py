"""Ranks: the loss over several processes is one process's, and so is the averaged gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle import losses
from oracle.case import Case, Group
from oracle.exact import exact
from oracle.laws.law import Broken, HangError, law
from oracle.laws.losses import unit_rows
from oracle.outcome import gap, same
from oracle.ranks import WORLDS, RankDeclinedError, RankError, RankHangError, over_ranks, row_counts, spread

Shares = list[tuple[Group, ...]]


def groups_of_ranks(case: Case) -> Shares:
    """Each rank's groups: of any size and number; for some seeds alike on all ranks, since many trainers gather
    nothing else."""
    ranks = _ranks(case)
    if case.seed // 9 != 2:  # neither seed % 3, which chooses the world, nor what chooses use_batch
        return spread(case, ranks)
    least, each = min(len(group.negatives) for group in case.groups), len(case.groups) // ranks
    alike = [replace(group, negatives=group.negatives[:least]) for group in case.groups]
    return [tuple(alike[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _ranks(case: Case) -> int:
    return min(WORLDS[case.seed % len(WORLDS)], len(case.groups))


def _judge(implementation: Any, shares: Shares, case: Case, expected_loss: Any, mean_of_ranks: bool) -> None:
    ranks = len(shares)
    rows = unit_rows(sum(row_counts(shares)), case.seed)
    leaf = rows.clone().requires_grad_()
    with exact():
        expected = expected_loss(leaf)
        expected.backward()
    assert leaf.grad is not None
    shown = [f"groups of {[[len(g.sequences) for g in share] for share in shares]} rows on {ranks} ranks"]
    try:
        results = over_ranks(implementation, shares, case.options, rows, mean_of_ranks)
    except RankDeclinedError as error:
        raise NotImplementedError from error
    except RankError as error:
        raise (HangError if isinstance(error, RankHangError) else Broken)(str(error), shown) from error
    wanted: tuple[Tensor, ...] = leaf.grad.split(row_counts(shares))
    for rank, (result, gradient) in enumerate(zip(results, wanted, strict=True)):
        if not same(result.loss, expected.detach()):
            raise Broken(
                f"rank {rank} of {ranks} has the loss {float(result.loss):.17g}, one process {float(expected):.17g}",
                shown,
            )
        # The trainer averages over ranks, so before that each rank's gradient is so many times as large.
        # Three ranks' thirds are rounded: there the loss alone is compared in every bit.
        if ranks in (2, 4) and not same(result.gradient, gradient * ranks):
            size = gap(result.gradient / ranks, gradient)
            raise Broken(f"rank {rank} of {ranks}: after averaging its rows' gradient is off by {size:.3g}", shown)


@law("rank_loss", share=24, loss="infonce", least_groups=4)
def loss_and_gradient_equal_one_process(implementation: Any, case: Case) -> None:
    """Every rank has the whole batch's loss, and the averaged gradient is the whole batch's, bit for bit."""
    # Without the rest of the batch only sums travel: another path. Not by seed % len(WORLDS), which chooses the world.
    if case.seed // len(WORLDS) % 3 == 1:
        case = replace(case, options=replace(case.options, use_batch=False))
    shares = groups_of_ranks(case)
    labels = Case(tuple(group for share in shares for group in share)).labels

    def expected(leaf: Tensor) -> Tensor:
        return losses.loss(leaf, labels, case.options)

    _judge(implementation, shares, case, expected, False)


@law("rank_loss", share=3, loss="infonce", least_groups=4)
def mean_of_ranks_is_what_it_says(implementation: Any, case: Case) -> None:
    """Without use_batch, mean_of_ranks weighs each rank's mean the same, whatever number of groups it has."""
    options = case.options.__class__(temperature=case.options.temperature, use_batch=False)
    shares = spread(case, _ranks(case))  # with groups alike it would be the mean over all of them

    def expected(leaf: Tensor) -> Tensor:
        pieces = leaf.split(row_counts(shares))
        means = [losses.loss(piece, Case(share).labels, options) for piece, share in zip(pieces, shares, strict=True)]
        return torch.stack(means).sum() / len(means)

    _judge(implementation, shares, replace(case, options=options), expected, True)
