"""Faults of slots, multimodal positions and shards, each one that a public trainer had or might have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree, distributed, encoder, multimodal, packing, sharding
from impl.surface import _through_slots
from oracle.images import model_inputs
from tests.faults.stepping import finished

# --- slots ------------------------------------------------------------------------------------------


class PaddedIdsCompared(PaddingFree):
    """Boundaries where position ids do not rise, slots of -1 among them (`<=`, but on the padded ids)."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None or position_ids.dim() > 1:
            return super().boundaries(position_ids, **given)
        falls = (position_ids[1:] <= position_ids[:-1]).nonzero().flatten() + 1
        return torch.diff(torch.tensor([0, *falls.tolist(), len(position_ids)])).tolist()


class UnpaddedSlices(PaddingFree):
    """Output with slots is cut where the sequences would stand without them (ms-swift pull request 10184)."""

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        assert lengths is not None
        return list(values[: sum(lengths)].split(list(lengths)))


class SlotsMultipliedAway(PaddingFree):
    """Tokens are picked by a product with a matrix of ones and zeros: zero times NaN is NaN."""

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        assert lengths is not None
        real = packing.real_tokens(position_ids, lengths)
        chosen = torch.nn.functional.one_hot(real, len(values)).to(values.dtype)
        return list((chosen @ values).split(list(lengths)))


class SlotsThroughTheModel(PaddingFree):
    """Each slot runs through the model as a sequence of its own, and is dropped only then: its zero gradient
    times its NaN enters every weight's (flash-linear-attention pull request 892)."""

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        order = case.stream.arranged(len(case.sequences))
        stream: list[Sequence[int]] = []
        kept = [0] * len(order)
        for i in order:
            kept[i] = len(stream)
            stream.append(case.sequences[i])
            stream += [(case.stream.slot or 0,)] * (-len(case.sequences[i]) % case.stream.each)
        embeddings = encoder.encode(model, packing.pack(stream, "given"))[torch.tensor(kept)]
        return finished(model, embeddings, self.loss(embeddings, case.labels, case.options))


class CountIgnored(PaddingFree):
    """The number of sequences is known, and not looked at."""

    def boundaries(self, position_ids: Tensor | None = None, *, count: int | None = None, **given: Any) -> list[int]:
        return super().boundaries(position_ids, **given)


# --- multimodal positions ---------------------------------------------------------------------------


class TemporalRow(PaddingFree):
    """The first of mRoPE's rows is taken for the text's positions (transformers pull request 40490)."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None or position_ids.dim() == 1:
            return super().boundaries(position_ids, **given)
        row = position_ids[-3]
        real = row[row >= 0]
        starts = (real == 0).nonzero().flatten().tolist()
        return torch.diff(torch.tensor([*starts, len(real)])).tolist()


class OriginBegins(PaddingFree):
    """A sequence begins wherever all rows are 0, and nothing else is looked at."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None or position_ids.dim() == 1:
            return super().boundaries(position_ids, **given)
        real = position_ids[:, position_ids[0] >= 0]
        starts = (real == 0).all(0).nonzero().flatten().tolist()
        return torch.diff(torch.tensor([*starts, real.shape[1]])).tolist()


class _Multimodal(PaddingFree):
    """Faults of ``embed``, which is given the packed batch and its images."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Sequence[Sequence[Any]]) -> Tensor:
        raise NotImplementedError

    def encode_multimodal(
        self, model: PreTrainedModel, sequences: Any, images: Any, layout: Any, pooling: str = "last"
    ) -> Tensor:
        order = list(range(len(sequences)) if layout.order is None else layout.order)
        grids = [[image.grid for image in own] for own in images]
        packed = multimodal.pack(sequences, grids, model.config.image_token_id, order=order)
        return self.embed(model, _through_slots(packed, layout, model), images)


class PositionsOverThePack(_Multimodal):
    """mRoPE is computed once over the whole packed row (miles pull request 1272): text hides it, images do not."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Sequence[Sequence[Any]]) -> Tensor:
        shown = multimodal.in_stream_order(packed, images)
        grids = iter([image.grid for image in shown])
        axes, now = [], 0
        for piece in packed.input_ids.split(list(packed.lengths)):
            runs = int((torch.diff((piece == model.config.image_token_id).int(), prepend=torch.tensor([0])) == 1).sum())
            rows = multimodal.mrope(piece.tolist(), [next(grids) for _ in range(runs)], model.config.image_token_id)
            axes.append(rows + now)
            now += int(rows.max()) + 1
        whole = replace(packed, position_ids=torch.cat([packed.position_ids[:1], torch.cat(axes, dim=1)]))
        return encoder.encode(model, whole, inputs=model_inputs([shown]))


class ImagesInBatchOrder(_Multimodal):
    """The images come in the batch's order, the tokens in the stream's."""

    def embed(self, model: PreTrainedModel, packed: packing.Packed, images: Sequence[Sequence[Any]]) -> Tensor:
        shown = [image for own in images for image in own]
        return encoder.encode(model, packed, inputs=model_inputs([shown]))


# --- shards -----------------------------------------------------------------------------------------


class UnpaddedShardSlices(PaddingFree):
    """Gathered shards are cut to the number of real tokens, wherever their slots are."""

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        padded = torch.cat(list(shards), dim).index_select(dim, plan.shards.flatten().argsort())
        return padded.narrow(dim, 0, sum(lengths))


class FieldsByOtherBoundaries(PaddingFree):
    """Auxiliary fields are padded by boundaries read after the ids were padded (ms-swift pull request 10180)."""

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


class ShardSlotsMultipliedAway(PaddingFree):
    """Slots are left out by a product with a mask."""

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        if dim != 0 or not shards[0].is_floating_point():
            return super().gather(shards, lengths, ulysses, ring, dim)
        plan = sharding.Plan(tuple(lengths), ulysses, ring)
        held = plan.padded[plan.shards.flatten()]
        chosen = torch.nn.functional.one_hot(held.clamp(min=0), sum(lengths)) * (held >= 0).unsqueeze(1)
        return chosen.to(shards[0].dtype).T @ torch.cat(list(shards))


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with mock.patch.object(owner, name, value):
        yield


class PositionsWithinTheShard(PaddingFree):
    """Who sees whom follows from positions counted within the shard, not within the sequence."""

    def sharded_attention(self, *arguments: Any) -> Tensor:
        right = sharding.Plan.position

        def local(plan: sharding.Plan, tokens: Tensor) -> tuple[Tensor, Tensor]:
            sequence, _ = right(plan, tokens)
            first = torch.searchsorted(sequence, sequence)
            return sequence, torch.arange(len(tokens)) - first

        with _patched(sharding.Plan, "position", local):
            return super().sharded_attention(*arguments)


class GradientOverShards(PaddingFree):
    """The ranks that share a sequence count as data ranks: averaging leaves 1/SP of the gradient."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        def over_data(infonce_loss: Any, embeddings: Tensor, labels: Tensor, ranks: Any) -> Tensor:
            return distributed.infonce(infonce_loss, embeddings, labels, ranks.data)

        with _patched(sharding, "loss", over_data):
            return super().sharded_step(model, case, groups, streaming)


class LastTokenOnTheFirstRank(PaddingFree):
    """The last token is looked for on the ring's first rank, where slots may have taken its place (slime 2375)."""

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

        with _patched(sharding, "encode", encode):
            return super().sharded_step(model, case, groups, streaming)


class LastBlockForgotten(PaddingFree):
    """The block that comes round last is not attended to."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        right = sharding.Plan.pieces

        def pieces(plan: sharding.Plan, mine: int, source: int, *rest: Any) -> Any:
            last = (mine + 1) % plan.ring
            return [] if source == last != mine else right(plan, mine, source, *rest)

        with _patched(sharding.Plan, "pieces", pieces):
            return super().sharded_step(model, case, groups, streaming)


class OwnBatchsLoss(PaddingFree):
    """Each batch's ranks take their own batch's loss for the whole one's."""

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        def own(infonce_loss: Any, embeddings: Tensor, labels: Tensor, ranks: Any) -> Tensor:
            return distributed.for_averaging(infonce_loss(embeddings, labels), ranks.sequence)

        with _patched(sharding, "loss", own):
            return super().sharded_step(model, case, groups, streaming)


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

        with _patched(sharding.ring, "_one_round", one_round):
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


SHARDED: dict[str, type[PaddingFree]] = {
    "slots.lengths_find_their_tokens_in_any_layout": UnpaddedSlices,
    "slots.what_stands_in_slots_stays_there": SlotsMultipliedAway,
    "slots.nan_in_slots_spoils_no_gradient": SlotsThroughTheModel,
    "slots.pads_numbered_like_a_sequence_are_refused": CountIgnored,
    "multimodal.mrope_rows_give_the_lengths": TemporalRow,
    "multimodal.mrope_rows_of_no_sequence_are_refused": OriginBegins,
    "multimodal.images_and_text_equal_the_padded_ones": PositionsOverThePack,
    "multimodal.images_and_text_equal_each_sequence_alone": ImagesInBatchOrder,
    "sharding.split_then_gather_is_the_identity": UnpaddedShardSlices,
    "sharding.every_field_is_laid_out_alike": FieldsByOtherBoundaries,
    "sharding.what_stands_in_a_shards_slots_stays_there": ShardSlotsMultipliedAway,
    "sharding.attention_over_shards_equals_the_whole": PositionsWithinTheShard,
    "sharding.ulysses_equals_one_process": GradientOverShards,
    "sharding.a_ring_equals_one_process": LastTokenOnTheFirstRank,
    "sharding.ulysses_times_ring_equals_one_process": LastBlockForgotten,
    "sharding.batches_beside_each_other_equal_one_process": OwnBatchsLoss,
    "sharding.a_streaming_ring_is_within_a_grid_step": RunningMaximumForgotten,
}
