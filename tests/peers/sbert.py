"""sentence-transformers: its modules padded and flattened, its poolings, its ranking losses, plain and cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import sentence_transformers
import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer, losses, util
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch import Tensor, nn
from transformers import PreTrainedModel

from oracle.case import Case
from oracle.models import HIDDEN
from tests.peers.flash import flashing
from tests.peers.models import directory, text

POOLING = {
    "last": "lasttoken",
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "mean_sqrt_len": "mean_sqrt_len_tokens",
    "weighted_mean": "weightedmean",
}
KINDS = {"qwen3": "qwen3", "gemma3_text": "gemma3", "modernbert": "modernbert", "bert": "bert"}
KINDS |= {"xlm-roberta": "xlm-roberta"}
PAIRS = {
    "cosine_similarity": losses.CosineSimilarityLoss,
    "contrastive": losses.ContrastiveLoss,
    "online_contrastive": losses.OnlineContrastiveLoss,
}


@cache
def loaded(kind: str) -> Transformer:
    """Its Transformer module."""
    return Transformer(directory(kind))


class Padded:
    """Texts through its tokenizing, the model, its pooling and its loss, padded."""

    name = "sentence-transformers, padded"
    __version__ = sentence_transformers.__version__
    unpad = False

    def __init__(self) -> None:
        for kind in KINDS.values():
            loaded(kind)  # outside exact arithmetic, which has no use for its set-up

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """The batch in the stream's order."""
        if layout.tail > 1 or layout.each > 1:
            raise NotImplementedError
        order = layout.arranged(len(sequences))
        with self.around(model, pooling) as whole:
            features = whole.preprocess([text(sequences[i]) for i in order])
            found: Tensor = whole(features)["sentence_embedding"]
        return found[torch.tensor(order).argsort()]

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """Its loss of columns."""
        columns, told = _columns(list(embeddings), labels, options)
        features = [{"sentence_embedding": torch.stack(column)} for column in columns]
        return _loss(_given(), options)(features, told)

    def chunked_loss(self, embeddings: Tensor, labels: Sequence[float], options: Any, chunk: int) -> Tensor:
        """The cached loss's own arithmetic, so many anchors at a time."""
        if options.matryoshka:
            raise NotImplementedError
        columns, told = _columns(list(embeddings), labels, options)
        reps = [[torch.stack(column)] for column in columns]
        return _loss(_given(), options, chunk).calculate_loss(reps, told)

    def step(self, model: PreTrainedModel, case: Case) -> Any:
        """A training step with columns of texts."""
        return self._stepped(model, case, None)

    def cached_step(self, model: PreTrainedModel, case: Case, size: int) -> Any:
        """With the cached loss, so many texts of a column at a time."""
        return self._stepped(model, case, size)

    def _stepped(self, model: PreTrainedModel, case: Case, size: int | None) -> Any:
        columns, told = _columns(case.sequences, case.labels, case.options)
        made: list[Tensor] = []
        model.zero_grad()
        with self.around(model, case.options.pooling) as whole:
            whole[2].register_forward_hook(lambda _, __, features: made.append(features["sentence_embedding"]))
            features = [whole.preprocess([text(ids) for ids in column]) for column in columns]
            loss = _loss(whole, case.options, size)(features, told)
            loss.backward()
        # Column after column; with the cached loss a second time, backward.
        rows = torch.cat([each.detach() for each in made])[: len(case.sequences)]
        embeddings = rows.view(len(columns), -1, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
        gradients = {name: each.grad for name, each in model.named_parameters()}
        return SimpleNamespace(embeddings=embeddings, loss=loss.detach(), gradients=gradients)

    @contextmanager
    def around(self, model: PreTrainedModel, pooling: str) -> Iterator[SentenceTransformer]:
        """A SentenceTransformer around the suite's model."""
        kind = KINDS.get(model.config.model_type)
        if kind is None:
            raise NotImplementedError
        own = loaded(kind)
        own.model = model
        with flashing(model) if self.unpad else nullcontext():
            own.unpad_inputs = self.unpad
            whole = SentenceTransformer(modules=[own, Pooling(HIDDEN, POOLING[pooling]), Normalize()], device="cpu")
            whole.train(model.training)
            yield whole


class Flattened(Padded):
    """Flattened, as flash attention has it: the kernels are stood in for."""

    name = "sentence-transformers, flattened"
    unpad = True


class GatherAcrossDevices:
    """Its ranking loss over all processes."""

    name = "sentence-transformers, gather_across_devices"
    __version__ = sentence_transformers.__version__

    def rank_loss(
        self, embeddings: Tensor, labels: Sequence[float], options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        """Declined by all alike where numbers differ, which it cannot gather."""
        world = dist.get_world_size(group)
        if mean_of_ranks or world != dist.get_world_size():  # it gathers over all processes, backward too
            raise NotImplementedError
        try:
            columns, told = _columns(list(embeddings), labels, options)
        except NotImplementedError:
            columns, told = [], torch.empty(0)
        size = torch.tensor([len(columns), len(columns[0]) if columns else 0])
        sizes = [torch.empty_like(size) for _ in range(world)]
        dist.all_gather(sizes, size, group)
        if not columns or any(not torch.equal(each, size) for each in sizes):
            raise NotImplementedError
        features = [{"sentence_embedding": torch.stack(column)} for column in columns]
        loss: Tensor = _loss(_given(), options, gather_across_devices=True)(features, told)
        whole = loss.detach().clone()  # its trainer shows the mean of the ranks' losses
        dist.all_reduce(whole, group=group)
        return loss + (whole / world - loss).detach()


class _Given(nn.Module):
    """A module that has embeddings already."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same."""
        return dict(features)


def _given() -> SentenceTransformer:
    return SentenceTransformer(modules=[_Given()], device="cpu")


def _columns(rows: Sequence[Any], labels: Sequence[float], options: Any) -> tuple[list[list[Any]], Tensor]:
    """Anchors, positives, first negatives, ... and the pairs' labels; groups of unequal size are declined."""
    starts = list(range(0, len(labels))) if options.of_pairs else [i for i, label in enumerate(labels) if label]
    sizes = {b - a for a, b in zip(starts, [*starts[1:], len(labels)], strict=True)}
    if len(sizes) != 1 or len(rows) != len(labels) + len(starts):
        raise NotImplementedError
    width = sizes.pop() + 1
    told = torch.tensor(labels)
    if options.loss == "online_contrastive" and min((told == 0).sum(), (told == 1).sum()) < 2:
        raise NotImplementedError  # a single pair has been judged by another rule since 6.0
    return [list(rows[at::width]) for at in range(width)], told


def _loss(model: nn.Module, options: Any, size: int | None = None, **more: Any) -> Any:
    """Its loss; options it lacks are declined."""
    if options.of_pairs and size is None and not options.matryoshka and not more:
        return PAIRS[options.loss](model)
    lacking = options.mask_fake_negative or options.hard_negatives is not None or options.include_dd
    if options.loss != "infonce" or not options.use_batch or lacking:
        raise NotImplementedError

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        return util.dot_score(a, b) / options.temperature  # a scale of 1 / temperature would be rounded once more

    directions = ("query_to_doc", "query_to_query") if options.include_qq else ("query_to_doc",)
    told = {"scale": 1.0, "similarity_fct": similarity, "directions": directions, **more}
    if size is None:
        found = losses.MultipleNegativesRankingLoss(model, **told)
    else:
        found = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=size, **told)
    if not options.matryoshka:
        return found
    dimensions, weights = zip(*options.matryoshka, strict=True)
    return losses.MatryoshkaLoss(model, found, list(dimensions), list(weights))
