"""One fault for every law: the law must kill it, and the message must say where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import Packed, PaddingFree, distributed, encoder, losses
from oracle.case import Stream
from tests.faults.founding import StrictDecrease
from tests.faults.sharded import SHARDED, PaddedIdsCompared
from tests.faults.stepping import finished

Sequences = Sequence[Sequence[int]]


class TailSlotsCounted(PaddingFree):
    """Slots at the tail are counted into the last sequence."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        lengths = super().boundaries(position_ids, **given)
        if position_ids is not None:
            trailing = len(position_ids) - int((position_ids >= 0).nonzero()[-1]) - 1
            lengths[-1] += trailing
        return lengths


class PaddedSegments(PaddingFree):
    """A sequence's length is the distance between two beginnings, slots and all."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None:
            return super().boundaries(position_ids, **given)
        starts = [*(position_ids == 0).nonzero().flatten().tolist(), len(position_ids)]
        return [after - before for before, after in itertools.pairwise(starts)]


class LastCuSeqlenDropped(PaddingFree):
    """The last cumulative length is taken for the stream's, not for a boundary."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if given.get("cu_seqlens") is not None:
            given["cu_seqlens"] = given["cu_seqlens"][:-1]
        return super().boundaries(position_ids, **given)


class ZerosBegin(PaddingFree):
    """A sequence begins at every 0, and nothing else is looked at."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if position_ids is None:
            return super().boundaries(position_ids, **given)
        real = position_ids[position_ids >= 0]
        starts = [*(real == 0).nonzero().flatten().tolist(), len(real)]
        return [after - before for before, after in itertools.pairwise(starts)]


class PlainDifferences(PaddingFree):
    """Lengths are the differences of cu_seqlens, whatever those are."""

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        if given.get("cu_seqlens") is None:
            return super().boundaries(position_ids, **given)
        return [int(n) for n in given["cu_seqlens"].diff()]


class _Encoder(PaddingFree):
    """Faults of the encoder: ``embed`` is wrong somewhere."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        raise NotImplementedError

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        return self.embed(model, self.pack(model, sequences, layout), pooling)

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        embeddings = self.encode(model, case.sequences, case.stream, case.options.pooling)
        return finished(model, embeddings, self.loss(embeddings, case.labels, case.options))


def _pooled(states: Tensor, packed: Packed, at: Tensor) -> Tensor:
    return torch.nn.functional.normalize(states[at], dim=-1)


class NoBoundariesInAttention(_Encoder):
    """The attention kernel takes the stream for one sequence; positions and pooling are right."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        whole = len(packed.input_ids)
        merged = replace(packed, lengths=(whole,), order=(0,), cu_seqlens=torch.tensor([0, whole], dtype=torch.int32))
        return _pooled(encoder.hidden_states(model, merged, self.backend), packed, packed.last_tokens())


class StreamOrder(_Encoder):
    """Embeddings come back as they stand in the stream, not as they were given."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        states = encoder.hidden_states(model, packed, self.backend)
        return _pooled(states, packed, packed.cu_seqlens[1:].long() - 1)


class PositionsNeverReset(_Encoder):
    """Positions count on through the stream: rotary embedding hides it from any tolerance."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        running = torch.arange(len(packed.position_ids)) + packed.position_ids[0]
        return encoder.encode(model, replace(packed, position_ids=running), pooling, self.backend)


class SlotsPooled(_Encoder):
    """The last token of a sequence is looked for at the end of its padded segment."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        padded = [[*ids, *[0] * (-len(ids) % layout.each)] for ids in sequences]
        packed = self.pack(model, padded, replace(layout, each=1, tail=1))
        return encoder.encode(model, packed, pooling, self.backend)


class BatchStatistics(_Encoder):
    """Values are right, but each embedding's gradient reaches the whole batch."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        out = encoder.encode(model, packed, pooling, self.backend)
        mean = out.sum(dim=0)
        return out + (mean - mean.detach())


class NotNormalised(_Encoder):
    """The pooled vectors themselves."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        return encoder.pool(encoder.hidden_states(model, packed, self.backend), packed, pooling)


class SecondLastPooled(_Encoder):
    """The token before the last one is pooled, as if an end token had been counted twice."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        starts = packed.cu_seqlens[:-1].long()[torch.tensor(packed.places)]
        at = torch.maximum(packed.last_tokens() - 1, starts)
        return _pooled(encoder.hidden_states(model, packed, self.backend), packed, at)


class FirstKeyDropped(_Encoder):
    """A sequence of several tokens loses its first one."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        return super().encode(model, [ids[1:] or ids for ids in sequences], layout, pooling)

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        return encoder.encode(model, packed, pooling, self.backend)


class FirstTokenPooled(_Encoder):
    """CLS pooling where last-token pooling was asked for."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        starts = packed.cu_seqlens[:-1].long()[torch.tensor(packed.places)]
        return _pooled(encoder.hidden_states(model, packed, self.backend), packed, starts)


class HalfGradient(PaddingFree):
    """Embeddings and loss are right; one parameter's gradient is half of it."""

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        made = super().step(model, case)
        name = next(n for n in sorted(made.gradients) if bool(made.gradients[n].any()))
        made.gradients[name] = made.gradients[name] / 2
        return made


class TemperatureMultiplied(PaddingFree):
    """The similarities are multiplied by the temperature."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        return super().loss(embeddings, labels, replace(options, temperature=1 / options.temperature))


class FirstGroupTwice(PaddingFree):
    """The first group's positive counts for every anchor."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        starts = [i for i, label in enumerate(labels) if label != 0]
        documents = [row for row in range(len(embeddings)) if row not in {s + g for g, s in enumerate(starts)}]
        anchors = embeddings[torch.tensor([s + g for g, s in enumerate(starts)])]
        logits = anchors @ embeddings[torch.tensor(documents)].T / options.temperature
        return torch.nn.functional.cross_entropy(logits, torch.zeros(len(starts), dtype=torch.int64))


class SurplusRowsIgnored(PaddingFree):
    """Labels rule; rows that they do not speak of are cut off, missing ones made up."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        needed = len(labels) + sum(label != 0 for label in labels)
        return super().loss(embeddings[torch.arange(needed) % len(embeddings)], labels, options)


class MaskedAfterDivision(PaddingFree):
    """Fake negatives are looked for among the logits, after the temperature has divided them."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        if options.mask_fake_negative:
            options = replace(options, fake_negative_margin=options.fake_negative_margin * options.temperature)
        return super().loss(embeddings, labels, options)


class ThresholdOfAnotherRow(PaddingFree):
    """Each anchor's fake negatives are measured against its neighbour's positive."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        if not options.mask_fake_negative or not options.use_batch or options.loss != "infonce":
            return super().loss(embeddings, labels, options)
        starts, sizes = losses.groups(labels, len(embeddings))
        kept = torch.ones(len(embeddings), dtype=torch.bool).index_fill(0, torch.tensor(starts), False)
        target = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        similar = embeddings[torch.tensor(starts)] @ embeddings[kept].T
        limit = similar.gather(1, target.unsqueeze(1)).detach().roll(1, 0) + options.fake_negative_margin
        masked = similar.masked_fill(similar > limit, -torch.inf)
        return torch.nn.functional.cross_entropy(masked / options.temperature, target)


class BoundaryCountedTwice(_Encoder):
    """The mean divides by one token too many."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        if pooling not in ("mean", "mean_sqrt_len"):
            return encoder.encode(model, packed, pooling, self.backend)
        states = encoder.hidden_states(model, packed, self.backend)
        pieces = packed.unpack(states)
        following = [pieces[(i + 1) % len(pieces)][0] for i in range(len(pieces))]
        means = [(p.sum(dim=0) + f) / (len(p) + 1) for p, f in zip(pieces, following, strict=True)]
        return torch.nn.functional.normalize(torch.stack(means), dim=-1)


class PositiveResampled(PaddingFree):
    """Missing hard negatives are drawn from positive and negatives but the last (ms-swift up to 4.5.3)."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        if options.hard_negatives is None:
            return super().loss(embeddings, labels, options)
        starts, sizes = losses.groups(labels, len(embeddings))
        generator = torch.Generator().manual_seed(options.resample_seed)
        rows, wanted = [], []
        for start, size in zip(starts, sizes, strict=True):
            own = list(range(start + 1, start + 1 + size))
            missing = max(0, options.hard_negatives - (size - 1))
            drawn = torch.randint(size - 1, (missing,), generator=generator).tolist()
            rows += [start, *own[: options.hard_negatives + 1], *(own[i] for i in drawn)]
            wanted += [1.0, *[0.0] * options.hard_negatives]
        return super().loss(embeddings[torch.tensor(rows)], wanted, replace(options, hard_negatives=None))


class PrefixNotRenormalised(PaddingFree):
    """A Matryoshka prefix is used as it is, shorter than one."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        if not options.matryoshka:
            return super().loss(embeddings, labels, options)
        plain = replace(options, matryoshka=())
        return torch.stack(
            [
                w * super(PrefixNotRenormalised, self).loss(embeddings[:, :d], labels, plain)
                for d, w in options.matryoshka
            ]
        ).sum()


class SwiftForPaper(PaddingFree):
    """ms-swift's options taken for the paper's formula: the positive meets its own negatives, unmasked."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        if options.loss == "qwen3":
            options = replace(
                options, loss="infonce", include_qq=True, include_dd=True, mask_fake_negative=True, use_batch=True
            )
        return super().loss(embeddings, labels, options)


class DistanceForCosine(PaddingFree):
    """The labels are compared with the distance, not with the cosine."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        if options.loss == "cosine_similarity":
            return super().loss(embeddings, [1 - label for label in labels], options)
        return super().loss(embeddings, labels, options)


class ContrastiveWithoutHalf(PaddingFree):
    """The contrastive loss without its factor of one half."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        return super().loss(embeddings, labels, options) * (2 if options.loss == "contrastive" else 1)


class EveryPairIsHard(PaddingFree):
    """The online contrastive loss without its choice of hard pairs."""

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        if options.loss == "online_contrastive":
            return losses.contrastive(embeddings, labels) * 2 * len(labels)
        return super().loss(embeddings, labels, options)


class ChunkLocalTargets(PaddingFree):
    """Each chunk looks for its positives as if it were the first."""

    def chunked_loss(self, embeddings: Tensor, labels: Sequence[float], options: Any, chunk: int) -> Tensor:
        starts, sizes = losses.groups(labels, len(embeddings))
        anchors = torch.tensor(starts)
        kept = torch.ones(len(embeddings), dtype=torch.bool).index_fill(0, anchors, False)
        documents, first = embeddings[kept], torch.tensor([0, *sizes[:-1]]).cumsum(0)
        total = embeddings.sum() * 0
        for piece in anchors.split(chunk):
            logits = embeddings[piece] @ documents.T / options.temperature
            total = total + torch.nn.functional.cross_entropy(logits, first[: len(piece)], reduction="sum")
        return total / len(starts)


class LastMiniBatchOnly(PaddingFree):
    """The second pass goes over the last mini-batch alone (sentence-transformers pull request 3854)."""

    def cached_step(self, model: PreTrainedModel, case: Any, size: int) -> SimpleNamespace:
        batches = [case.sequences[i : i + size] for i in range(0, len(case.sequences), size)]
        with torch.no_grad():
            pieces = [self.encode(model, batch, Stream(), case.options.pooling) for batch in batches]
        leaf = torch.cat(pieces).requires_grad_()
        loss = self.loss(leaf, case.labels, case.options)
        loss.backward()
        assert leaf.grad is not None
        model.zero_grad()
        last = self.encode(model, batches[-1], Stream(), case.options.pooling)
        last.backward(gradient=leaf.grad[-len(last) :])
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return SimpleNamespace(embeddings=leaf.detach(), loss=loss.detach(), gradients=gradients)


class GradientOverRanks(PaddingFree):
    """The loss over all ranks is right; averaging leaves 1/W of its gradient (ms-swift up to 4.5.3)."""

    def rank_loss(
        self, embeddings: Tensor, labels: Sequence[float], options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        right = super().rank_loss(embeddings, labels, options, group, mean_of_ranks)
        wrong = right / torch.distributed.get_world_size(group)
        return right.detach() + (wrong - wrong.detach())


class MeanOfAllGroups(PaddingFree):
    """The mean over all groups where the mean of the ranks' means was asked for."""

    def rank_loss(
        self, embeddings: Tensor, labels: Sequence[float], options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        return super().rank_loss(embeddings, labels, options, group, False)


class LocalLabels(PaddingFree):
    """Rows are gathered, labels are not (ms-swift pull request 10069)."""

    def rank_loss(
        self, embeddings: Tensor, labels: Sequence[float], options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        rows, _ = distributed.gather(embeddings, torch.tensor(labels, dtype=embeddings.dtype), group)
        return distributed.for_averaging(self.loss(rows[: len(embeddings)], labels, options), group)


class PositivesFirst(PaddingFree):
    """Documents are gathered with all positives before all negatives (sentence-transformers 3453)."""

    def rank_loss(
        self, embeddings: Tensor, labels: Sequence[float], options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        rows, everybodys = distributed.gather(embeddings, torch.tensor(labels, dtype=embeddings.dtype), group)
        starts, _ = losses.groups(everybodys, len(rows))
        positives = torch.tensor(starts) + 1
        others = [r for r in range(len(rows)) if r not in starts and r not in positives.tolist()]
        documents = torch.cat([rows[torch.tensor(starts) + 1].flip(0), rows[torch.tensor(others, dtype=torch.int64)]])
        logits = rows[torch.tensor(starts)] @ documents.T / options.temperature
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(starts)))
        return distributed.for_averaging(loss, group)


class EveryTokenWeighsTheSame(_Encoder):
    """The mean where the position-weighted mean was asked for."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        chosen = "mean" if pooling == "weighted_mean" else pooling
        return encoder.encode(model, packed, chosen, self.backend)


PLANTED: dict[str, type[PaddingFree]] = {
    "boundaries.lengths_are_recovered": StrictDecrease,
    "boundaries.slots_at_the_tail_change_nothing": TailSlotsCounted,
    "boundaries.slots_after_each_sequence_change_nothing": PaddedSegments,
    "boundaries.cu_seqlens_give_the_lengths": LastCuSeqlenDropped,
    "boundaries.what_cannot_be_split_is_refused": ZerosBegin,
    "boundaries.malformed_cu_seqlens_are_refused": PlainDifferences,
    "isolation.other_sequences_tokens_do_not_matter": NoBoundariesInAttention,
    "isolation.order_does_not_matter": StreamOrder,
    "isolation.number_does_not_matter": PositionsNeverReset,
    "isolation.what_stands_in_slots_does_not_matter": SlotsPooled,
    "isolation.gradients_stay_within_the_sequence": BatchStatistics,
    "agreement.every_sequence_has_one_embedding": NotNormalised,
    "agreement.embeddings_equal_the_padded_ones": SecondLastPooled,
    "agreement.every_pooling_equals_the_padded_one": EveryTokenWeighsTheSame,
    "agreement.embeddings_equal_each_sequence_alone": FirstKeyDropped,
    "agreement.the_last_token_is_pooled": FirstTokenPooled,
    "agreement.a_training_step_equals_the_padded_one": HalfGradient,
    "losses.infonce_equals_its_definition": TemperatureMultiplied,
    "losses.every_option_equals_its_definition": MaskedAfterDivision,
    "losses.hard_negatives_equal_their_definition": PositiveResampled,
    "losses.matryoshka_equals_its_definition": PrefixNotRenormalised,
    "losses.the_papers_formula_equals_its_definition": SwiftForPaper,
    "losses.cosine_similarity_equals_its_definition": DistanceForCosine,
    "losses.contrastive_equals_its_definition": ContrastiveWithoutHalf,
    "losses.online_contrastive_equals_its_definition": EveryPairIsHard,
    "losses.the_order_of_groups_does_not_matter": FirstGroupTwice,
    "losses.labels_that_do_not_fit_are_refused": SurplusRowsIgnored,
    "replay.a_chunked_loss_equals_the_whole_one": ChunkLocalTargets,
    "replay.a_gradient_cache_equals_the_plain_step": LastMiniBatchOnly,
    "ranks.loss_and_gradient_equal_one_process": GradientOverRanks,
    "ranks.mean_of_ranks_is_what_it_says": MeanOfAllGroups,
    **SHARDED,
}

# More faults than one for a law: law -> faults.
FURTHER: list[tuple[str, type[PaddingFree]]] = [
    ("boundaries.slots_at_the_tail_change_nothing", PaddedIdsCompared),
    ("boundaries.slots_after_each_sequence_change_nothing", PaddedIdsCompared),
    ("ranks.loss_and_gradient_equal_one_process", LocalLabels),
    ("ranks.loss_and_gradient_equal_one_process", PositivesFirst),
    ("losses.every_option_equals_its_definition", ThresholdOfAnotherRow),
    ("agreement.every_pooling_equals_the_padded_one", BoundaryCountedTwice),
    ("agreement.a_training_step_equals_the_padded_one", FirstKeyDropped),
    ("agreement.embeddings_equal_the_padded_ones", PositionsNeverReset),
    ("isolation.order_does_not_matter", NoBoundariesInAttention),
]
