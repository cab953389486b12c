"""Losses over groups and pairs, vectorised, for equal and for ragged groups, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from impl.errors import EmbeddingError, LabelError

Labels = Tensor | Sequence[float]
MARGIN = 0.5  # of the contrastive losses


@dataclass(frozen=True)
class InfoNCE:
    """InfoNCE's options, with ms-swift 4.6.0's meanings and defaults.

    Attributes:
        temperature: divides the similarities, after masking.
        use_batch: all groups' documents are candidates of every anchor, else only its own group's.
        hard_negatives: every group gets exactly so many negatives: the first, or its own drawn again.
        resample_seed: of that draw.
        mask_fake_negative, fake_negative_margin: leaves out candidates more similar than the positive
            plus the margin.
        include_qq, include_dd: other anchors as candidates; documents against the own positive.
        paper: the Qwen3-Embedding report's own formula (arXiv 2506.05176) instead; use_batch, qq, dd and
            masking are part of it.
        chunk: anchors at a time. None: all at once. A chunk's similarities are computed again in the
            backward pass, so that no more than chunk x documents of them ever exist.
    """

    temperature: float = 0.1
    use_batch: bool = True
    hard_negatives: int | None = None
    resample_seed: int = 0
    mask_fake_negative: bool = False
    fake_negative_margin: float = 0.1
    include_qq: bool = False
    include_dd: bool = False
    paper: bool = False
    chunk: int | None = None

    def __call__(self, embeddings: Tensor, labels: Labels, identities: Sequence[Hashable] | None = None) -> Tensor:
        """The mean of the groups' losses.

        Args:
            embeddings: [rows, d], L2-normalised; group after group: anchor, positive, negatives.
            labels: one for each positive (not 0) and negative (0), none for an anchor.
            identities: one a row, equal for equal texts; only the paper's formula asks.

        Raises:
            LabelError: rows and labels do not fit, or a group has no negative where some are asked for.
            EmbeddingError: an embedding holds NaN or is zero.
        """
        total, count = self.sum_and_count(embeddings, labels, identities)
        return total / count

    def sum_and_count(
        self, embeddings: Tensor, labels: Labels, identities: Sequence[Hashable] | None = None
    ) -> tuple[Tensor, int]:
        """The sum of the groups' losses, and their number."""
        batch = _Batch(embeddings, labels, self, identities)
        step = self.chunk or batch.count
        pieces = zip(batch.anchors.split(step), batch.positives.split(step), range(0, batch.count, step), strict=True)
        sums = []
        for anchors, positives, start in pieces:
            tensors = (anchors, positives, batch.anchors, batch.documents)
            run = partial(_chunk_loss, batch, self, start)
            sums.append(run(*tensors) if self.chunk is None else _Again.apply(run, *tensors))
        return torch.stack(sums).sum(), batch.count


class _Again(torch.autograd.Function):
    """A function of tensors whose backward computes it again, so that only its inputs are kept.

    torch.utils.checkpoint would do, but keeps what it computed again until the whole backward pass ends.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            again = ctx.run(*tensors)
        return None, *torch.autograd.grad(again, tensors, gradients[0], allow_unused=True)


def infonce(embeddings: Tensor, labels: Labels, temperature: float = 0.1, use_batch: bool = True) -> Tensor:
    """InfoNCE (van den Oord et al., 2018) with the usual two options; see ``InfoNCE``."""
    return InfoNCE(temperature, use_batch)(embeddings, labels)


class _Batch:
    """Groups as index tensors: what a chunk addresses by global index."""

    def __init__(
        self, embeddings: Tensor, labels: Labels, options: InfoNCE, identities: Sequence[Hashable] | None
    ) -> None:
        starts, sizes = groups(labels, len(embeddings))
        check_embeddings(embeddings, starts)
        device = embeddings.device
        rows = [list(range(start + 1, start + 1 + size)) for start, size in zip(starts, sizes, strict=True)]
        if options.hard_negatives is not None:
            rows = _resample(rows, options.hard_negatives, options.resample_seed)
        self.sizes = torch.tensor([len(each) for each in rows], device=device)
        self.first = self.sizes.cumsum(0) - self.sizes  # each positive's place among the documents
        self.widest = max(len(each) for each in rows)
        self.count = len(rows)
        flat = [row for each in rows for row in each]
        self.anchors = embeddings[torch.tensor(starts, device=device)]
        self.positives = embeddings[torch.tensor(starts, device=device) + 1]
        self.documents = embeddings[torch.tensor(flat, device=device)]
        self.owner = torch.repeat_interleave(self.sizes, output_size=len(flat))
        self.texts: Tensor | None = None
        if identities is not None:
            known = {name: i for i, name in enumerate(dict.fromkeys(identities))}
            self.texts = torch.tensor([known[identities[row]] for row in flat], device=device)


def _chunk_loss(
    batch: _Batch,
    options: InfoNCE,
    start: int,
    anchors: Tensor,
    positives: Tensor,
    all_anchors: Tensor,
    documents: Tensor,
) -> Tensor:
    """The summed losses of some anchors [c, d], the first of which is group ``start``."""
    rows = torch.arange(start, start + len(anchors), device=anchors.device)
    target = batch.first[rows].unsqueeze(1)
    if not options.use_batch and not options.paper:
        return _own_documents_loss(batch, options, rows, anchors, documents)
    qd = anchors @ documents.T
    threshold = qd.gather(1, target).detach() + options.fake_negative_margin
    itself = torch.zeros_like(qd, dtype=torch.bool).scatter(1, target, True)
    parts = [qd]
    if options.paper:
        out = qd > threshold
        if batch.texts is not None:
            out = out | ((batch.texts == batch.texts[target]) & ~itself)
        own = batch.owner == rows.unsqueeze(1)
        parts = [qd.masked_fill(out, -torch.inf), (positives @ documents.T).masked_fill(out | own, -torch.inf)]
    else:
        if options.mask_fake_negative:
            parts = [qd.masked_fill(qd > threshold, -torch.inf)]
        if options.include_dd:
            parts.append((positives @ documents.T).masked_fill(itself, -torch.inf))
    if options.include_qq or options.paper:
        qq = anchors @ all_anchors.T
        out = torch.zeros_like(qq, dtype=torch.bool).scatter(1, rows.unsqueeze(1), True)
        if options.mask_fake_negative or options.paper:
            out = out | (qq > threshold)
        parts.append(qq.masked_fill(out, -torch.inf))
    return cross_entropy(torch.cat(parts, dim=1) / options.temperature, target.squeeze(1), reduction="sum")


def _own_documents_loss(batch: _Batch, options: InfoNCE, rows: Tensor, anchors: Tensor, documents: Tensor) -> Tensor:
    """Each anchor against its own group's documents; ragged groups are masked, not looped over."""
    place = torch.arange(batch.widest, device=rows.device)
    missing = place >= batch.sizes[rows].unsqueeze(1)
    candidates = documents[(batch.first[rows].unsqueeze(1) + place).masked_fill(missing, 0)]
    logits = (candidates @ anchors.unsqueeze(-1)).squeeze(-1) / options.temperature
    return cross_entropy(logits.masked_fill(missing, -torch.inf), torch.zeros_like(rows), reduction="sum")


def _resample(rows: list[list[int]], wanted: int, seed: int) -> list[list[int]]:
    """Each group's positive and exactly ``wanted`` negatives, by one generator over all groups."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for g, (positive, *negatives) in enumerate(rows):
        if not negatives:
            raise LabelError(f"group {g} has no negative where {wanted} hard negatives are asked for")
        missing = max(0, wanted - len(negatives))
        drawn = torch.randint(len(negatives), (missing,), generator=generator).tolist()
        result.append([positive, *negatives[:wanted], *(negatives[i] for i in drawn)])
    return result


def groups(labels: Labels, rows: int) -> tuple[list[int], list[int]]:
    """Each group's anchor row, and its number of documents; LabelError where they do not fit ``rows``."""
    values = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    firsts = [i for i, label in enumerate(values) if label != 0]
    if not firsts or firsts[0] != 0:
        found = f"{values[0]}" if values else "none"
        raise LabelError(f"the labels must begin with a positive (not 0), found {found}")
    needed = len(values) + len(firsts)
    sizes = [end - start for start, end in zip(firsts, [*firsts[1:], len(values)], strict=True)]
    starts = [first + g for g, first in enumerate(firsts)]
    if rows != needed:
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        group = next((g for g, end in enumerate(ends) if end >= rows), None)
        where = f"row {needed} belongs to no group" if group is None else f"group {group} lacks rows"
        raise LabelError(
            f"{rows} embeddings do not fit {len(values)} labels in {len(firsts)} groups, which need {needed}: {where}"
        )
    return starts, sizes


def check_embeddings(embeddings: Tensor, starts: Sequence[int]) -> None:
    """Refuses rows of NaN or zeros; ``starts`` are the groups' first rows."""
    for what, bad in (
        ("holds NaN", torch.isnan(embeddings).any(dim=1)),
        ("is zero: it has no direction", ~embeddings.any(dim=1)),
    ):
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            group = sum(start <= row for start in starts) - 1
            raise EmbeddingError(f"embedding {row} of group {group} {what}")


def matryoshka(loss: InfoNCE, embeddings: Tensor, labels: Labels, prefixes: Sequence[tuple[int, float]]) -> Tensor:
    """Matryoshka representation learning (Kusupati et al., 2022): the loss of each (dimensions, weight)."""
    widest = max(dimensions for dimensions, _ in prefixes)
    if widest > embeddings.shape[1]:
        raise EmbeddingError(f"matryoshka asks for {widest} dimensions of {embeddings.shape[1]}")
    weighted = [
        weight * loss(normalize(embeddings[:, :dimensions], dim=-1, eps=1e-12), labels)
        for dimensions, weight in prefixes
    ]
    return torch.stack(weighted).sum()


# --- pairs ------------------------------------------------------------------------------------------


def _pairs(embeddings: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Cosines of rows 0 and 1, 2 and 3, ..., and the labels as a tensor."""
    wanted = torch.as_tensor(labels, dtype=embeddings.dtype, device=embeddings.device)
    if len(wanted) == 0 or len(embeddings) != 2 * len(wanted):
        raise LabelError(f"{len(embeddings)} embeddings do not fit {len(wanted)} pairs, which need {2 * len(wanted)}")
    check_embeddings(embeddings, range(0, len(embeddings), 2))
    unit = normalize(embeddings, dim=-1, eps=1e-12)
    return (unit[0::2].unsqueeze(1) @ unit[1::2].unsqueeze(2)).flatten(), wanted


def cosine_similarity(embeddings: Tensor, labels: Labels) -> Tensor:
    """Mean of (cosine - label)^2 over pairs."""
    cosine, wanted = _pairs(embeddings, labels)
    return ((cosine - wanted) ** 2).mean()


def contrastive(embeddings: Tensor, labels: Labels) -> Tensor:
    """Hadsell et al., 2006, on the cosine distance; margin 0.5."""
    cosine, wanted = _pairs(embeddings, labels)
    distance = 1 - cosine
    return (0.5 * (wanted * distance**2 + (1 - wanted) * torch.relu(MARGIN - distance) ** 2)).mean()


def online_contrastive(embeddings: Tensor, labels: Labels) -> Tensor:
    """The contrastive loss of hard pairs only, summed (sentence-transformers' OnlineContrastiveLoss)."""
    cosine, wanted = _pairs(embeddings, labels)
    other = ((wanted != 0) & (wanted != 1)).nonzero().flatten()
    if len(other):
        raise LabelError(f"pair {int(other[0])} has the label {float(wanted[other[0]])}; only 0 and 1 will do")
    distance = 1 - cosine
    far, near = distance[wanted == 0], distance[wanted == 1]
    hard_far = far[far < (near.amax() if len(near) > 1 else far.mean())]
    hard_near = near[near > (far.amin() if len(far) > 1 else near.mean())]
    return (torch.relu(MARGIN - hard_far) ** 2).sum() + (hard_near**2).sum()
