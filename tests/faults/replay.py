"""Passes that are repeated, cut into pieces or put together again, and do not give the plain one's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from impl import PaddingFree, losses, surface
from oracle.case import Stream
from tests.faults.catalogue import planted

CHUNKED = "replay.a_chunked_loss_equals_the_whole_one"
CACHED = "replay.a_gradient_cache_equals_the_plain_step"
STEP = "agreement.a_training_step_equals_the_padded_one"
Batches = list[list[tuple[int, ...]]]


@planted(STEP, smallest=[1, 1, 1])
class HalfGradient(PaddingFree):
    """Embeddings and loss are right; one parameter's gradient is half of it."""

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        made = super().step(model, case)
        name = next(n for n in sorted(made.gradients) if bool(made.gradients[n].any()))
        made.gradients[name] = made.gradients[name] / 2
        return made


@planted(STEP, "NVIDIA/Megatron-LM/pull/4593", smallest=[1, 1, 1])
class RecomputationDropsGradients(PaddingFree):
    """A layer that is computed again gives its input's gradient, and its parameters none."""

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        made = super().step(model, case)
        made.gradients = {name: g for name, g in made.gradients.items() if "layers.0." not in name}
        return made


# --- losses in chunks -------------------------------------------------------------------------------


@planted(CHUNKED)
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
            total = total + cross_entropy(logits, first[: len(piece)], reduction="sum")
        return total / len(starts)


class _Windows(PaddingFree):
    """Faults of putting together the sums of a chunk's groups: ``joined``."""

    def joined(self, sums: list[Tensor], counts: list[int]) -> Tensor:
        raise NotImplementedError

    def chunked_loss(self, embeddings: Tensor, labels: Sequence[float], options: Any, chunk: int) -> Tensor:
        infonce = surface._infonce(options)
        batch = losses._Batch(embeddings, labels, infonce, None)
        sums, counts = [], []
        for start in range(0, batch.count, chunk):
            own = slice(start, start + chunk)
            pieces = batch.anchors[own], batch.positives[own], batch.anchors, batch.documents
            sums.append(losses._chunk_loss(batch, infonce, start, *pieces))
            counts.append(len(pieces[0]))
        return self.joined(sums, counts)


@planted(CHUNKED, "meta-pytorch/torchtune/pull/1875")
class MeanOfChunkMeans(_Windows):
    """The mean of the chunks' means, which weighs a short last chunk's groups more."""

    def joined(self, sums: list[Tensor], counts: list[int]) -> Tensor:
        return torch.stack([total / count for total, count in zip(sums, counts, strict=True)]).mean()


@planted(CHUNKED, "verl-project/verl/pull/3332")
class ChunkMeansSummed(_Windows):
    """The chunks' means are added up: the more chunks, the larger the gradient."""

    def joined(self, sums: list[Tensor], counts: list[int]) -> Tensor:
        return torch.stack([total / count for total, count in zip(sums, counts, strict=True)]).sum()


@planted(CHUNKED, "ml-explore/mlx-lm/pull/1413")
class LastWindowDropped(_Windows):
    """A last chunk that is not full is left out."""

    def joined(self, sums: list[Tensor], counts: list[int]) -> Tensor:
        full = [i for i, count in enumerate(counts) if count == counts[0]]
        return torch.stack([sums[i] for i in full]).sum() / sum(counts[i] for i in full)


@planted(CHUNKED, "unslothai/unsloth-zoo/pull/1023")
class DividedTwice(_Windows):
    """Two places divide by the number of chunks."""

    def joined(self, sums: list[Tensor], counts: list[int]) -> Tensor:
        return torch.stack(sums).sum() / sum(counts) / len(sums)


@planted(CHUNKED, "huggingface/transformers/issues/35203")
class ItemsOfTheFirst(_Windows):
    """The first chunk's number of groups normalises all of them."""

    def joined(self, sums: list[Tensor], counts: list[int]) -> Tensor:
        return torch.stack(sums).sum() / counts[0] / len(sums)


# --- gradient caches --------------------------------------------------------------------------------


class _Cached(PaddingFree):
    """Faults of the second pass: which texts it embeds, which gradients it takes, and what is done with them."""

    def second(self, batches: Batches, gradients: list[Tensor]) -> tuple[Batches, list[Tensor]]:
        return batches, gradients

    def cached_step(self, model: PreTrainedModel, case: Any, size: int) -> SimpleNamespace:
        def embed(batch: Any) -> Tensor:
            return self.encode(model, batch, Stream(), case.options.pooling)

        batches = [case.sequences[i : i + size] for i in range(0, len(case.sequences), size)]
        with torch.no_grad():
            pieces = [embed(batch) for batch in batches]
        leaf = torch.cat(pieces).requires_grad_()
        loss = self.loss(leaf, case.labels, case.options)
        loss.backward()
        assert leaf.grad is not None
        model.zero_grad()
        again, wanted = self.second(batches, list(leaf.grad.split([len(piece) for piece in pieces])))
        for batch, gradient in zip(again, wanted, strict=True):
            embed(batch).backward(gradient=gradient)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return SimpleNamespace(embeddings=leaf.detach(), loss=loss.detach(), gradients=gradients)


@planted(CACHED, "huggingface/sentence-transformers/pull/3854", smallest=[1, 1, 1])
class LastMiniBatchOnly(_Cached):
    """The second pass goes over the last mini-batch alone."""

    def second(self, batches: Batches, gradients: list[Tensor]) -> tuple[Batches, list[Tensor]]:
        return batches[-1:], gradients[-1:]


@planted(CACHED, "huggingface/sentence-transformers/pull/3862")
class PromptHiddenTwice(_Cached):
    """What hides a prompt is changed in place: the second pass does not see the first token any more."""

    def second(self, batches: Batches, gradients: list[Tensor]) -> tuple[Batches, list[Tensor]]:
        return [[ids[1:] or ids for ids in batch] for batch in batches], gradients


@planted(CACHED, "nvidia-cosmos/cosmos-rl/pull/691")
class PackedAnew(_Cached):
    """The second pass packs its texts anew, by length; the gradients stay in the first one's order."""

    def second(self, batches: Batches, gradients: list[Tensor]) -> tuple[Batches, list[Tensor]]:
        return [sorted(batch, key=len) for batch in batches], gradients


@planted(CACHED, "PrimeIntellect-ai/prime-rl/pull/583")
class OwnCountDivides(_Cached):
    """Each mini-batch's gradient is divided by its own count where the batch's should: short ones weigh more."""

    def second(self, batches: Batches, gradients: list[Tensor]) -> tuple[Batches, list[Tensor]]:
        most = max(map(len, gradients))
        return batches, [gradient * (most / len(gradient)) for gradient in gradients]
