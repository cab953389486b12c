"""Ranks: the loss over several processes is one process's, and so is the averaged gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle import losses
from oracle.case import Case, Group
from oracle.exact import exact
from oracle.laws.law import Broken, law
from oracle.laws.losses import unit_rows
from oracle.outcome import gap, same
from oracle.ranks import WORLDS, RankError, over_ranks


def _spread(case: Case) -> list[tuple[Group, ...]]:
    """The case's groups over two to four ranks, unevenly: the last rank gets what is left."""
    world = min(WORLDS[case.seed % len(WORLDS)], len(case.groups))
    return [(group,) for group in case.groups[: world - 1]] + [case.groups[world - 1 :]]


def _judge(implementation: Any, case: Case, expected_loss: Any, mean_of_ranks: bool) -> None:
    spread = _spread(case)
    rows = unit_rows(len(case.sequences), case.seed)
    parts = list(rows.split([sum(len(g.sequences) for g in share) for share in spread]))
    labels = [Case(share, options=case.options).labels for share in spread]
    leaf = rows.clone().requires_grad_()
    with exact():
        expected = expected_loss(leaf, spread)
        expected.backward()
    assert leaf.grad is not None
    shown = [f"groups of {[[len(g.sequences) for g in share] for share in spread]} rows on {len(spread)} ranks"]
    try:
        results = over_ranks(implementation, parts, labels, case.options, mean_of_ranks)
    except RankError as error:
        if "NotImplementedError" in str(error):
            raise NotImplementedError from error
        raise Broken(str(error), shown) from error
    wanted: tuple[Tensor, ...] = leaf.grad.split([len(part) for part in parts])
    for rank, (result, gradient) in enumerate(zip(results, wanted, strict=True)):
        if not same(result.loss, expected.detach()):
            raise Broken(
                f"rank {rank} of {len(spread)} has the loss {float(result.loss):.17g}, "
                f"one process {float(expected):.17g}",
                shown,
            )
        # The trainer averages over ranks, so before that each rank's gradient is so many times as large.
        # Three ranks' thirds are rounded: there the loss alone is compared in every bit.
        if len(spread) in (2, 4) and not same(result.gradient, gradient * len(spread)):
            size = gap(result.gradient / len(spread), gradient)
            raise Broken(
                f"rank {rank} of {len(spread)}: after averaging its rows' gradient is off by {size:.3g}", shown
            )


@law("rank_loss", share=8, loss="infonce", least_groups=4)
def loss_and_gradient_equal_one_process(implementation: Any, case: Case) -> None:
    """Every rank has the whole batch's loss, and the averaged gradient is the whole batch's, bit for bit."""

    def expected(leaf: Tensor, _: list[tuple[Group, ...]]) -> Tensor:
        return losses.loss(leaf, case.labels, case.options)

    _judge(implementation, case, expected, False)


@law("rank_loss", share=3, loss="infonce", least_groups=4)
def mean_of_ranks_is_what_it_says(implementation: Any, case: Case) -> None:
    """Without use_batch, mean_of_ranks weighs each rank's mean the same, whatever number of groups it has."""
    options = case.options.__class__(temperature=case.options.temperature, use_batch=False)

    def expected(leaf: Tensor, spread: list[tuple[Group, ...]]) -> Tensor:
        pieces = leaf.split([sum(len(g.sequences) for g in share) for share in spread])
        means = [losses.loss(piece, Case(share).labels, options) for piece, share in zip(pieces, spread, strict=True)]
        return torch.stack(means).sum() / len(means)

    _judge(implementation, Case(case.groups, options=options, seed=case.seed), expected, True)
