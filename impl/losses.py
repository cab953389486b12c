"""InfoNCE over groups, vectorised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.errors import EmbeddingError, LabelError


def infonce(
    embeddings: Tensor, labels: Tensor | Sequence[float], temperature: float = 0.1, use_batch: bool = True
) -> Tensor:
    """InfoNCE (van den Oord et al., 2018), mean over groups.

    Args:
        embeddings: [rows, d], L2-normalised; group after group: anchor, positive, negatives.
        labels: one for each positive (not 0) and negative (0), none for an anchor: rows = labels + groups.
        use_batch: all groups' documents are candidates of every anchor, else only its own group's.

    Raises:
        LabelError: rows and labels do not fit. EmbeddingError: an embedding holds NaN.
    """
    starts, sizes = _groups(labels, len(embeddings))
    if bool(torch.isnan(embeddings).any()):
        row = int(torch.isnan(embeddings).any(dim=1).nonzero()[0])
        raise EmbeddingError(f"embedding {row} holds NaN")
    device = embeddings.device
    anchors = torch.tensor(starts, device=device)
    is_document = torch.ones(len(embeddings), dtype=torch.bool, device=device).index_fill(0, anchors, False)
    documents = embeddings[is_document]
    first = anchors - torch.arange(len(starts), device=device)  # each positive's place among the documents
    if use_batch:
        logits = embeddings[anchors] @ documents.T / temperature
        return torch.nn.functional.cross_entropy(logits, first)
    own = torch.arange(max(sizes), device=device)
    missing = own >= torch.tensor(sizes, device=device).unsqueeze(1)
    candidates = documents[(first.unsqueeze(1) + own).masked_fill(missing, 0)]
    logits = (candidates @ embeddings[anchors].unsqueeze(-1)).squeeze(-1) / temperature
    return torch.nn.functional.cross_entropy(logits.masked_fill(missing, -torch.inf), torch.zeros_like(anchors))


def _groups(labels: Tensor | Sequence[float], rows: int) -> tuple[list[int], list[int]]:
    """Each group's anchor row, and its number of documents."""
    values = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    firsts = [i for i, label in enumerate(values) if label != 0]
    if not firsts or firsts[0] != 0:
        raise LabelError(
            "the labels must begin with a positive (not 0), found " + (f"{values[0]}" if values else "none")
        )
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
