"""Losses over ranks: rows gathered in rank order, with the gradient that data-parallel averaging wants.

A trainer (DistributedDataParallel) averages the ranks' gradients. Every rank computes the whole batch's
loss, and only its own rows carry its gradient; so that the average is the whole batch's gradient, the
loss's gradient is multiplied by the number of ranks. (ms-swift up to 4.5.3 left that out: 1/W of it.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from impl.errors import LabelError
from impl.losses import InfoNCE

Group = dist.ProcessGroup | None


def _counts(count: int, device: torch.device, group: Group) -> list[int]:
    """Every rank's count."""
    mine = torch.tensor([count], dtype=torch.int64, device=device)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    return [int(each) for each in theirs]


def _all_gather(x: Tensor, counts: list[int], group: Group) -> Tensor:
    """The ranks' x [n_r, ...] one after another; ranks may differ in n_r."""
    most = max(counts)
    mine = x.new_zeros(most, *x.shape[1:])
    mine[: len(x)] = x
    theirs = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(theirs, mine, group=group)
    return torch.cat([each[:count] for each, count in zip(theirs, counts, strict=True)])


class _Gather(torch.autograd.Function):
    """All ranks' rows; each rank keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: Group) -> Tensor:
        ctx.own = slice(sum(counts[: dist.get_rank(group)]), sum(counts[: dist.get_rank(group) + 1]))
        return _all_gather(x, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own], None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks; each rank's own part carries its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _ForAveraging(torch.autograd.Function):
    """The same value; its gradient times the number of ranks, which averaging takes away again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks, None


def rows_of_all(x: Tensor, counts: list[int], group: Group = None) -> Tensor:
    """All ranks' x [counts[rank], ...] one after another, the same on every rank; its own carry their gradient."""
    rows: Tensor = _Gather.apply(x, counts, group)
    return rows


def gather(embeddings: Tensor, labels: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    """All ranks' embeddings [rows, d] and labels [m], in rank order, the same on every rank.

    Ranks may hold different numbers of rows and groups. A rank's own rows carry their gradient, so the
    ranks' parameter gradients add up to the whole batch's: see ``for_averaging``.
    """
    if len(embeddings) != len(labels) + int((labels != 0).sum()):
        raise LabelError(
            f"rank {dist.get_rank(group)}: {len(embeddings)} embeddings do not fit {len(labels)} labels "
            f"in {int((labels != 0).sum())} groups"
        )
    rows = rows_of_all(embeddings, _counts(len(embeddings), embeddings.device, group), group)
    everybodys = _all_gather(labels, _counts(len(labels), labels.device, group), group)
    return rows, everybodys


def for_averaging(loss: Tensor, group: Group = None) -> Tensor:
    """A loss over gathered rows, for a trainer that averages the ranks' gradients."""
    return _ForAveraging.apply(loss, dist.get_world_size(group))


def infonce(
    loss: InfoNCE, embeddings: Tensor, labels: Tensor, group: Group = None, mean_of_ranks: bool = False
) -> Tensor:
    """InfoNCE over all ranks' groups: the same value on every rank, the right gradient after averaging.

    Args:
        loss: with use_batch (or the paper's formula) the ranks' rows are gathered; without it each rank
            computes its own groups and only sums travel.
        mean_of_ranks: without use_batch, the mean of the ranks' means, which weighs the groups of ranks
            with fewer of them more; ms-swift's. The default is the mean over all groups.
    """
    if loss.use_batch or loss.paper:
        if mean_of_ranks:
            raise LabelError("mean_of_ranks has no meaning where the batch is shared")
        return for_averaging(loss(*gather(embeddings, labels, group)), group)
    total, count = loss.sum_and_count(embeddings, labels)
    if mean_of_ranks:
        whole = _Sum.apply(total / count, group) / dist.get_world_size(group)
    else:
        whole = _Sum.apply(total, group) / sum(_counts(count, embeddings.device, group))
    return for_averaging(whole, group)
