"""Right embeddings, wrong partners, masks or normalisers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from impl import PaddingFree, losses
from tests.faults.catalogue import planted

Labels = Sequence[float]
INFONCE = "losses.infonce_equals_its_definition"
OPTIONS = "losses.every_option_equals_its_definition"


class _InfoNCE(PaddingFree):
    """Faults of the loss over groups: ``infonce`` is wrong, the pair losses are right."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        raise NotImplementedError

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        plain = options.loss == "infonce" and not options.matryoshka and options.hard_negatives is None
        return self.infonce(embeddings, labels, options) if plain else self.right(embeddings, labels, options)

    def right(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        return PaddingFree.loss(self, embeddings, labels, options)


def _simple(options: Any) -> bool:
    """Neither masking nor further candidates."""
    return not (options.mask_fake_negative or options.include_qq or options.include_dd)


def _parts(embeddings: Tensor, labels: Labels) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Anchors, documents, each anchor's positive among the documents, documents a group."""
    starts, sizes = losses.groups(labels, len(embeddings))
    kept = torch.ones(len(embeddings), dtype=torch.bool).index_fill(0, torch.tensor(starts), False)
    target = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    return embeddings[torch.tensor(starts)], embeddings[kept], target, sizes


@planted(INFONCE, smallest=[1, 1, 1])
class TemperatureMultiplied(PaddingFree):
    """The similarities are multiplied by the temperature."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        return super().loss(embeddings, labels, replace(options, temperature=1 / options.temperature))


@planted(INFONCE, smallest=[1, 1, 1])
class TemperatureTwice(PaddingFree):
    """The similarities are divided by the temperature, and then once more."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        return super().loss(embeddings, labels, replace(options, temperature=options.temperature**2))


@planted(INFONCE, "danielward27/flowjax/pull/164")
class PositiveNotInTheDenominator(_InfoNCE):
    """The denominator sums the negatives, and leaves the positive out."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        anchors, documents, target, _ = _parts(embeddings, labels)
        if not options.use_batch or not _simple(options) or len(documents) < 2:
            return self.right(embeddings, labels, options)
        logits = anchors @ documents.T / options.temperature
        negatives = logits.scatter(1, target.unsqueeze(1), -torch.inf)
        return (negatives.logsumexp(1) - logits.gather(1, target.unsqueeze(1)).squeeze(1)).mean()


@planted(INFONCE, "huggingface/sentence-transformers/pull/3827")
class ListsPaddedWithZeros(_InfoNCE):
    """Shorter groups are filled up with similarities of zero, which count in the denominator."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        anchors, documents, _, sizes = _parts(embeddings, labels)
        if options.use_batch or not _simple(options):
            return self.right(embeddings, labels, options)
        pieces = zip(anchors, documents.split(sizes), strict=True)
        rows = [torch.nn.functional.pad(own @ anchor, (0, max(sizes) - len(own))) for anchor, own in pieces]
        return cross_entropy(torch.stack(rows) / options.temperature, torch.zeros(len(rows), dtype=torch.int64))


@planted(INFONCE, "unslothai/unsloth-zoo/pull/1066")
class BoundaryLeftOutTwice(_InfoNCE):
    """The normaliser leaves out one group that is in the sum: a boundary taken off twice."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        count = sum(label != 0 for label in labels)
        return self.right(embeddings, labels, options) * count / max(1, count - 1)


@planted(INFONCE)
class SumOverGroups(_InfoNCE):
    """The groups' losses are summed."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        return self.right(embeddings, labels, options) * sum(label != 0 for label in labels)


@planted(INFONCE)
class MeanOverDocuments(_InfoNCE):
    """The sum of the groups' losses is divided by the number of labels, negatives among them."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        return self.right(embeddings, labels, options) * sum(label != 0 for label in labels) / len(labels)


@planted(OPTIONS)
class LabelsWeigh(_InfoNCE):
    """A positive's label, which marks it, is taken for its weight."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        return self.right(embeddings, labels, options) * max(labels)


@planted("losses.the_order_of_groups_does_not_matter")
class FirstGroupTwice(_InfoNCE):
    """The first group's positive counts for every anchor."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        anchors, documents, target, _ = _parts(embeddings, labels)
        return cross_entropy(anchors @ documents.T / options.temperature, torch.zeros_like(target))


@planted(INFONCE)
class NeighboursPositive(_InfoNCE):
    """Every anchor is drawn to the next group's positive: an offset of one in the targets."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        anchors, documents, target, _ = _parts(embeddings, labels)
        if not options.use_batch or not _simple(options):
            return self.right(embeddings, labels, options)
        return cross_entropy(anchors @ documents.T / options.temperature, target.roll(-1))


@planted(INFONCE, smallest=[1, 1, 1])
class AnchorIsADocument(_InfoNCE):
    """Rows are counted from the anchor: it stands among its own candidates, and the last document does not."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        starts, sizes = losses.groups(labels, len(embeddings))
        if options.use_batch or not _simple(options):
            return self.right(embeddings, labels, options)
        terms = []
        for start, size in zip(starts, sizes, strict=True):
            own = embeddings[start : start + size] @ embeddings[start] / options.temperature
            terms.append(-torch.log_softmax(own, dim=0)[min(1, size - 1)])
        return torch.stack(terms).mean()


@planted("losses.labels_that_do_not_fit_are_refused", smallest=[1, 1, 1])
class SurplusRowsIgnored(PaddingFree):
    """Labels rule; rows that they do not speak of are cut off, missing ones made up."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        needed = len(labels) + sum(label != 0 for label in labels)
        return super().loss(embeddings[torch.arange(needed) % len(embeddings)], labels, options)


@planted("losses.labels_that_do_not_fit_are_refused", "HobbitLong/SupContrast/pull/142")
class GroupWithoutPositive(PaddingFree):
    """A first group without a positive counts for nothing: 0 over 0, taken for 0."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if len(labels) and labels[0] == 0:
            return (embeddings * 0).sum()
        return super().loss(embeddings, labels, options)


@planted(OPTIONS)
class MaskedAfterDivision(PaddingFree):
    """Fake negatives are looked for among the logits, after the temperature has divided them."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if options.mask_fake_negative:
            options = replace(options, fake_negative_margin=options.fake_negative_margin * options.temperature)
        return super().loss(embeddings, labels, options)


@planted(OPTIONS)
class MarginSubtracted(PaddingFree):
    """Fake negatives are those above the positive less the margin."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if options.mask_fake_negative:
            options = replace(options, fake_negative_margin=-options.fake_negative_margin)
        return super().loss(embeddings, labels, options)


@planted(OPTIONS)
class ThresholdOfAnotherRow(_InfoNCE):
    """Each anchor's fake negatives are measured against its neighbour's positive."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if not options.mask_fake_negative or not options.use_batch:
            return self.right(embeddings, labels, options)
        anchors, documents, target, _ = _parts(embeddings, labels)
        similar = anchors @ documents.T
        limit = similar.gather(1, target.unsqueeze(1)).detach().roll(1, 0) + options.fake_negative_margin
        return cross_entropy(similar.masked_fill(similar > limit, -torch.inf) / options.temperature, target)


@planted(OPTIONS, "McGill-NLP/llm2vec/issues/178")
class LikenessIsIdentity(_InfoNCE):
    """Other groups' documents as similar as the positive are taken for its copies and left out, unasked."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if not options.use_batch or not _simple(options):
            return self.right(embeddings, labels, options)
        anchors, documents, target, _ = _parts(embeddings, labels)
        similar = anchors @ documents.T
        itself = torch.zeros_like(similar, dtype=torch.bool).scatter(1, target.unsqueeze(1), True)
        copies = (similar >= similar.gather(1, target.unsqueeze(1))) & ~itself
        return cross_entropy(similar.masked_fill(copies, -torch.inf) / options.temperature, target)


@planted(OPTIONS)
class ItselfAmongTheAnchors(_InfoNCE):
    """With other anchors as candidates each anchor meets itself too, the most similar of all."""

    def infonce(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if not options.include_qq or options.mask_fake_negative or not options.use_batch:
            return self.right(embeddings, labels, options)
        anchors, documents, target, _ = _parts(embeddings, labels)
        parts = [anchors @ documents.T]
        if options.include_dd:
            parts.append((documents[target] @ documents.T).scatter(1, target.unsqueeze(1), -torch.inf))
        parts.append(anchors @ anchors.T)
        return cross_entropy(torch.cat(parts, dim=1) / options.temperature, target)


@planted("losses.hard_negatives_equal_their_definition", "modelscope/ms-swift/pull/10068")
class PositiveResampled(PaddingFree):
    """Missing hard negatives are drawn from positive and negatives but the last: an offset of one for two."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
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


@planted("losses.hard_negatives_equal_their_definition", "modelscope/ms-swift/issues/4588")
class CountIsText(PaddingFree):
    """The number of hard negatives comes out of the environment as text, and is compared with a number."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if options.hard_negatives is not None:
            options = replace(options, hard_negatives=1)
            object.__setattr__(options, "hard_negatives", "3")
        return super().loss(embeddings, labels, options)


@planted("losses.hard_negatives_equal_their_definition")
class LastNegativesKept(PaddingFree):
    """Of too many hard negatives the last ones are kept, where the first were asked for."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if options.hard_negatives is None:
            return super().loss(embeddings, labels, options)
        starts, sizes = losses.groups(labels, len(embeddings))
        rows = []
        for start, size in zip(starts, sizes, strict=True):
            rows += [start, start + 1, *reversed(range(start + 2, start + 1 + size))]
        return super().loss(embeddings[torch.tensor(rows)], labels, options)


@planted("losses.matryoshka_equals_its_definition")
class PrefixNotRenormalised(PaddingFree):
    """A Matryoshka prefix is used as it is, shorter than one."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if not options.matryoshka:
            return super().loss(embeddings, labels, options)
        plain = replace(options, matryoshka=())
        terms = [w * PaddingFree.loss(self, embeddings[:, :d], labels, plain) for d, w in options.matryoshka]
        return torch.stack(terms).sum()


@planted("losses.matryoshka_equals_its_definition")
class PrefixesWeighTheSame(PaddingFree):
    """The weights of a Matryoshka loss's prefixes stay where they were configured."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        alike = tuple((dimensions, 1.0) for dimensions, _ in options.matryoshka)
        return super().loss(embeddings, labels, replace(options, matryoshka=alike))


@planted("losses.the_papers_formula_equals_its_definition")
class SwiftForPaper(PaddingFree):
    """ms-swift's options taken for the paper's formula: the positive meets its own negatives, unmasked."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if options.loss == "qwen3":
            options = replace(
                options, loss="infonce", include_qq=True, include_dd=True, mask_fake_negative=True, use_batch=True
            )
        return super().loss(embeddings, labels, options)


@planted("losses.cosine_similarity_equals_its_definition", smallest=[1, 1])
class DistanceForCosine(PaddingFree):
    """The labels are compared with the distance, not with the cosine."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if options.loss == "cosine_similarity":
            labels = [1 - label for label in labels]
        return super().loss(embeddings, labels, options)


@planted("losses.contrastive_equals_its_definition", smallest=[1, 1])
class ContrastiveWithoutHalf(PaddingFree):
    """The contrastive loss without its factor of one half."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        return super().loss(embeddings, labels, options) * (2 if options.loss == "contrastive" else 1)


@planted("losses.online_contrastive_equals_its_definition", smallest=[1, 1])
class EveryPairIsHard(PaddingFree):
    """The online contrastive loss without its choice of hard pairs."""

    def loss(self, embeddings: Tensor, labels: Labels, options: Any) -> Tensor:
        if options.loss == "online_contrastive":
            return losses.contrastive(embeddings, labels) * 2 * len(labels)
        return super().loss(embeddings, labels, options)
