"""A stream over several ranks: cut, gathered or attended to at the wrong places."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree, distributed, packing, sharding
from tests.faults.catalogue import planted

IDENTITY = "sharding.split_then_gather_is_the_identity"
FIELDS = "sharding.every_field_is_laid_out_alike"
ATTENTION = "sharding.attention_over_shards_equals_the_whole"


@planted(IDENTITY, "modelscope/ms-swift/pull/10184", smallest=[1, 1])
class UnpaddedShardSlices(PaddingFree):
    """Gathered shards are cut to the number of real tokens, wherever their slots are."""

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        padded = torch.cat(list(shards), dim).index_select(dim, plan.shards.flatten().argsort())
        return padded.narrow(dim, 0, sum(lengths))


@planted(FIELDS, "modelscope/ms-swift/pull/10180", smallest=[1, 1])
class FieldsByOtherBoundaries(PaddingFree):
    """Auxiliary fields are padded by boundaries read after the ids were padded."""

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        if field.dim() == 1 and not field.is_floating_point():
            return plan.split(field, dim, fill)
        size = plan.shards.numel()
        missing = [*field.shape]
        missing[dim] = size - field.shape[dim]
        padded = torch.cat([field, field.new_full(missing, fill)], dim)
        return [padded.index_select(dim, held) for held in plan.shards]


@planted("sharding.what_stands_in_a_shards_slots_stays_there", smallest=[1, 1])
class ShardSlotsMultipliedAway(PaddingFree):
    """Slots are left out by a product with a mask."""

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        if dim != 0 or not shards[0].is_floating_point():
            return super().gather(shards, lengths, ulysses, ring, dim)
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        held = plan.padded[plan.shards.flatten()]
        chosen = torch.nn.functional.one_hot(held.clamp(min=0), sum(lengths)) * (held >= 0).unsqueeze(1)
        return chosen.to(shards[0].dtype).T @ torch.cat(list(shards))


@planted(ATTENTION, "NVIDIA/Megatron-LM/pull/4494", smallest=[1, 2])
class PositionsWithinTheShard(PaddingFree):
    """Who sees whom follows from positions counted within the shard, not within the sequence."""

    def sharded_attention(self, *arguments: Any) -> Tensor:
        right = sharding.Plan.position

        def local(plan: sharding.Plan, tokens: Tensor) -> tuple[Tensor, Tensor]:
            sequence, _ = right(plan, tokens)
            first = torch.searchsorted(sequence, sequence)
            return sequence, torch.arange(len(tokens)) - first

        with mock.patch.object(sharding.Plan, "position", local):
            return super().sharded_attention(*arguments)


@planted("sharding.ulysses_equals_one_process", smallest=[1, 1, 1])
class GradientOverShards(PaddingFree):
    """The ranks that share a sequence count as data ranks: averaging leaves 1/SP of the gradient."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        def over_data(infonce_loss: Any, embeddings: Tensor, labels: Tensor, ranks: Any) -> Tensor:
            return distributed.infonce(infonce_loss, embeddings, labels, ranks.data)

        with mock.patch.object(sharding, "loss", over_data):
            return super().sharded_step(model, case, groups, streaming)


@planted("sharding.a_ring_equals_one_process", "THUDM/slime/pull/2375", smallest=[1, 1, 2])
class LastTokenOnTheFirstRank(PaddingFree):
    """The last token is looked for on the ring's first rank, where slots may have taken its place."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        def encode(model: PreTrainedModel, packed: packing.Packed, ranks: Any, *rest: Any) -> Tensor:
            wire = ranks.wire(packed.lengths)
            states = wire.own(sharding.hidden_states(model, packed, wire, False), wire.plan.counts)
            whole = wire.plan.collected([states])
            first = torch.cat(wire.plan.tokens[: wire.plan.ulysses])
            sequence, _ = wire.plan.position(first)
            wanted = [
                int(first[sequence == place].max()) if (sequence == place).any() else 0 for place in packed.places
            ]
            return torch.nn.functional.normalize(whole[torch.tensor(wanted)], dim=-1)

        with mock.patch.object(sharding, "encode", encode):
            return super().sharded_step(model, case, groups, streaming)


@planted("sharding.ulysses_times_ring_equals_one_process", smallest=[1, 1, 2])
class LastBlockForgotten(PaddingFree):
    """The block that comes round last is not attended to."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        right = sharding.Plan.pieces

        def pieces(plan: sharding.Plan, mine: int, source: int, *rest: Any) -> Any:
            last = (mine + 1) % plan.ring
            return [] if source == last != mine else right(plan, mine, source, *rest)

        with mock.patch.object(sharding.Plan, "pieces", pieces):
            return super().sharded_step(model, case, groups, streaming)


@planted("sharding.batches_beside_each_other_equal_one_process", smallest=[1, 1, 1, 1])
class OwnBatchsLoss(PaddingFree):
    """Each batch's ranks take their own batch's loss for the whole one's."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        def own(infonce_loss: Any, embeddings: Tensor, labels: Tensor, ranks: Any) -> Tensor:
            return distributed.for_averaging(infonce_loss(embeddings, labels), ranks.sequence)

        with mock.patch.object(sharding, "loss", own):
            return super().sharded_step(model, case, groups, streaming)


@planted("sharding.a_streaming_ring_is_within_a_grid_step", smallest=[1, 1, 2])
class RunningMaximumForgotten(PaddingFree):
    """Sums so far are not scaled when the running maximum rises."""

    def streaming_step(self, model: PreTrainedModel, case: Any, groups: Any) -> SimpleNamespace:
        def one_round(blocks: Any, qs: list[Tensor], kvs: list[Tensor]) -> Any:
            tops = [q.new_full((*q.shape[:-1], 1), -torch.inf) for q in qs]
            totals, outs = [torch.zeros_like(top) for top in tops], [torch.zeros_like(q) for q in qs]
            for met in blocks.meetings(qs, kvs):
                top, total, out = (x[met.i][..., met.rows, :] for x in (tops, totals, outs))
                top.copy_(torch.maximum(top, met.scores.amax(-1, keepdim=True)))
                p = (met.scores - top.masked_fill(top.isinf(), 0.0)).exp()
                total.add_(p.sum(-1, keepdim=True))
                out.add_(p @ met.v)
            return [out / total for out, total in zip(outs, totals, strict=True)], tops, totals

        with mock.patch.object(sharding.ring, "_one_round", one_round):
            return super().streaming_step(model, case, groups)


class FirstRankWaits(PaddingFree):
    """One rank asks for a sum that no other rank takes part in."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        if torch.distributed.get_rank(groups.world) == 0:
            torch.distributed.all_reduce(torch.zeros(1), group=groups.sequence)
        return super().sharded_step(model, case, groups, streaming)


class SecondRankRaises(PaddingFree):
    """One rank fails while the others wait for it."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        if torch.distributed.get_rank(groups.world) == 1:
            raise ValueError("the second rank has had enough")
        return super().sharded_step(model, case, groups, streaming)


@planted(FIELDS, "verl-project/verl/issues/2639", smallest=[1, 1])
class RowsArePaddedOnly(PaddingFree):
    """Fields of several rows are filled up and not cut: whether to cut is read off the wrong sign."""

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        if field.dim() == 1:
            return plan.split(field, dim, fill)
        whole = torch.cat(plan.split(field, dim, fill), dim)
        return [whole] * plan.ranks


@planted(FIELDS, "verl-project/verl/issues/5957", smallest=[1, 1])
class MaskStaysWhole(PaddingFree):
    """A side input of one number a token is handed to every rank whole."""

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        return [field] * plan.ranks if field.dtype == torch.bool else plan.split(field, dim, fill)


@planted(IDENTITY, "jzhang38/EasyContext/issues/47", smallest=[1, 1])
class ChunksOfUnequalSize(PaddingFree):
    """A length that the ranks do not divide is cut into chunks of unequal sizes."""

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        return list(field.tensor_split(ulysses * ring, dim))

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        return torch.cat(list(shards), dim)


@planted(IDENTITY, smallest=[1, 1])
class RemainderDropped(PaddingFree):
    """Each rank takes the whole part of a division; the remaining tokens are on none."""

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        size = field.shape[dim] // (ulysses * ring)
        return [field.narrow(dim, rank * size, size) for rank in range(ulysses * ring)]

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        return torch.cat(list(shards), dim)


@planted(IDENTITY)
class ZigzagGatheredStraight(PaddingFree):
    """Chunks are dealt to the ring in zigzag, and put together again in the ranks' order."""

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        real = plan.padded[plan.shards.flatten()] >= 0
        return torch.cat(list(shards), dim).index_select(dim, real.nonzero().flatten())


@planted(ATTENTION, "Dao-AILab/flash-attention/issues/282", smallest=[1, 3])
class CausalFromTheBottomRight(PaddingFree):
    """A block's causal mask is aligned to its bottom right corner, wherever in the sequence it stands."""

    def sharded_attention(self, *arguments: Any) -> Tensor:
        right = sharding.Plan.pieces

        def pieces(plan: sharding.Plan, mine: int, source: int, *rest: Any) -> Any:
            found = []
            for rows, cols, hidden in right(plan, mine, source, *rest):
                above = torch.ones(hidden.shape, dtype=torch.bool).triu(hidden.shape[1] - hidden.shape[0] + 1)
                found.append((rows, cols, hidden | above))
            return found

        with mock.patch.object(sharding.Plan, "pieces", pieces):
            return super().sharded_attention(*arguments)
