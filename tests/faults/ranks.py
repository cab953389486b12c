"""Losses over several ranks: rows, labels or factors of the wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from impl import PaddingFree, distributed, losses, surface
from tests.faults.catalogue import planted

LOSS = "ranks.loss_and_gradient_equal_one_process"
Labels = Sequence[float]


class _Gathered(PaddingFree):
    """Faults of ``joined``: the loss from this rank's rows and everybody's."""

    def joined(self, embeddings: Tensor, labels: Tensor, options: Any, group: Any) -> Tensor:
        raise NotImplementedError

    def rank_loss(
        self, embeddings: Tensor, labels: Labels, options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        if mean_of_ranks:
            return super().rank_loss(embeddings, labels, options, group, mean_of_ranks)
        return self.joined(embeddings, torch.tensor(labels, dtype=embeddings.dtype), options, group)


@planted(LOSS, "lightly-ai/lightly/issues/1977", smallest=[1] * 8)
class GradientOverRanks(PaddingFree):
    """The loss over all ranks is right; averaging leaves one W-th of its gradient."""

    def rank_loss(
        self, embeddings: Tensor, labels: Labels, options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        right = super().rank_loss(embeddings, labels, options, group, mean_of_ranks)
        wrong = right / dist.get_world_size(group)
        return right.detach() + (wrong - wrong.detach())


@planted(LOSS, "JohnGiorgi/DeCLUTR/pull/212", smallest=[1] * 8)
class GatherWithoutGradient(_Gathered):
    """The gather cuts the graph, and only a rank's own anchors learn."""

    def joined(self, embeddings: Tensor, labels: Tensor, options: Any, group: Any) -> Tensor:
        rows, everybodys = distributed.gather(embeddings, labels, group)
        kept = torch.cat([rows.detach()[: len(rows) - len(embeddings)], embeddings])
        loss = surface._infonce(options)(rows.detach() + 0 * kept.sum(), everybodys)
        return distributed.for_averaging(loss, group)


@planted("ranks.mean_of_ranks_is_what_it_says")
class MeanOfAllGroups(PaddingFree):
    """The mean over all groups where the mean of the ranks' means was asked for."""

    def rank_loss(
        self, embeddings: Tensor, labels: Labels, options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        return super().rank_loss(embeddings, labels, options, group, False)


@planted(LOSS)
class MeanOfRanksUnasked(PaddingFree):
    """The mean of the ranks' means where the mean over all groups was asked for."""

    def rank_loss(
        self, embeddings: Tensor, labels: Labels, options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        return super().rank_loss(embeddings, labels, options, group, mean_of_ranks or not options.use_batch)


@planted(LOSS, "modelscope/ms-swift/pull/10069")
class LocalLabels(_Gathered):
    """Rows are gathered, labels are not."""

    def joined(self, embeddings: Tensor, labels: Tensor, options: Any, group: Any) -> Tensor:
        rows, _ = distributed.gather(embeddings, labels, group)
        return distributed.for_averaging(self.loss(rows[: len(embeddings)], labels.tolist(), options), group)


@planted(LOSS, "huggingface/sentence-transformers/pull/3453")
class PositivesFirst(_Gathered):
    """Documents are gathered with all positives before all negatives, each rank's targets as if they were not."""

    def joined(self, embeddings: Tensor, labels: Tensor, options: Any, group: Any) -> Tensor:
        rows, everybodys = distributed.gather(embeddings, labels, group)
        starts, _ = losses.groups(everybodys, len(rows))
        positives = torch.tensor(starts) + 1
        others = [r for r in range(len(rows)) if r not in starts and r not in positives.tolist()]
        documents = torch.cat([rows[positives].flip(0), rows[torch.tensor(others, dtype=torch.int64)]])
        logits = rows[torch.tensor(starts)] @ documents.T / options.temperature
        return distributed.for_averaging(cross_entropy(logits, torch.arange(len(starts))), group)


@planted(LOSS, "KevinMusgrave/pytorch-metric-learning/issues/639")
class OwnRankFirst(_Gathered):
    """Each rank puts its own rows first and the others' after, their labels in rank order."""

    def joined(self, embeddings: Tensor, labels: Tensor, options: Any, group: Any) -> Tensor:
        rows, everybodys = distributed.gather(embeddings, labels, group)
        counts = distributed._counts(len(embeddings), embeddings.device, group)
        start = sum(counts[: dist.get_rank(group)])
        end = start + len(embeddings)
        own_first = torch.cat([rows[start:end], rows[:start], rows[end:]])
        return distributed.for_averaging(surface._infonce(options)(own_first, everybodys), group)


@planted(LOSS, "nomewang/M3DM/issues/7", smallest=[1] * 8)
class OffsetWithoutGather(_Gathered):
    """Targets carry the rank's offset, and the logits are the rank's own: on rank 0 it is nothing."""

    def joined(self, embeddings: Tensor, labels: Tensor, options: Any, group: Any) -> Tensor:
        starts, _ = losses.groups(labels, len(embeddings))
        kept = torch.ones(len(embeddings), dtype=torch.bool).index_fill(0, torch.tensor(starts), False)
        logits = embeddings[torch.tensor(starts)] @ embeddings[kept].T / options.temperature
        target = torch.arange(len(starts)) + len(starts) * dist.get_rank(group)
        return distributed.for_averaging(cross_entropy(logits, target % logits.shape[1]), group)


@planted(LOSS, "meta-pytorch/torchtune/pull/2172", smallest=[1] * 8)
class AveragedOnceMore(PaddingFree):
    """The loss over all ranks' groups is divided by the number of ranks once more."""

    def rank_loss(
        self, embeddings: Tensor, labels: Labels, options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        return super().rank_loss(embeddings, labels, options, group, mean_of_ranks) / dist.get_world_size(group)


@planted(LOSS)
class CutToTheShortest(_Gathered):
    """Ranks gather as many groups as the one with the fewest has."""

    def joined(self, embeddings: Tensor, labels: Tensor, options: Any, group: Any) -> Tensor:
        starts, sizes = losses.groups(labels, len(embeddings))
        least = min(distributed._counts(len(starts), embeddings.device, group))
        rows = starts[least] if least < len(starts) else len(embeddings)
        infonce = surface._infonce(options)
        return distributed.infonce(infonce, embeddings[:rows], labels[: sum(sizes[:least])], group)
