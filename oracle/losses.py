"""Losses by definition: plain loops over groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oracle.case import Options


class LossInputError(ValueError):
    """Labels, rows or embeddings that do not belong together; names the group and the counts."""


def group_rows(labels: Sequence[float], rows: int) -> list[range]:
    """The rows of each group: anchor, positive, negatives.

    ``labels`` has an entry for each positive (not 0) and negative (0) and none for an anchor, so a
    group starts at each non-zero label and rows = labels + groups (ms-swift 4.6.0's convention, which
    does not check it).
    """
    if not labels:
        raise LossInputError("no labels: a loss needs at least one group")
    if labels[0] == 0:
        raise LossInputError("label 0 is 0: the first group has no positive")
    starts = [i for i, label in enumerate(labels) if label != 0]
    if rows != len(labels) + len(starts):
        raise LossInputError(
            f"{rows} embeddings do not fit {len(labels)} labels in {len(starts)} groups: rows = labels + groups "
            f"needs {len(labels) + len(starts)}. {_first_misfit(starts, len(labels), rows)}"
        )
    ends = [*starts[1:], len(labels)]
    return [range(start + g, end + g + 1) for g, (start, end) in enumerate(zip(starts, ends, strict=True))]


def _first_misfit(starts: list[int], labels: int, rows: int) -> str:
    if rows > labels + len(starts):
        return f"Row {labels + len(starts)} belongs to no group."
    for g, end in enumerate([*starts[1:], labels]):
        if end + g + 1 > rows:
            return f"Group {g} is the first without all its rows: it would end at row {end + g}."
    raise AssertionError("unreachable: some group must miss a row")


def check_embeddings(embeddings: Tensor) -> None:
    """Refuses embeddings that hold NaN, naming the first row."""
    bad = torch.isnan(embeddings).any(dim=1).nonzero().flatten().tolist()
    if bad:
        raise LossInputError(f"embedding {bad[0]} holds NaN ({len(bad)} of {len(embeddings)} do)")


def infonce(embeddings: Tensor, labels: Sequence[float], options: Options) -> Tensor:
    """InfoNCE (van den Oord et al., 2018) over groups; the mean of the groups' losses.

    Args:
        embeddings: [rows, d], pooled and L2-normalised; similarity is the dot product.
        labels: see ``group_rows``.
        options: temperature; use_batch: whether other groups' documents are negatives.

    Example: orthogonal anchor and negative, positive equal to the anchor, T = 1, gives
    -log(e / (e + 1)) = 0.3133.
    """
    groups = group_rows(labels, len(embeddings))
    check_embeddings(embeddings)
    losses = []
    for g, rows in enumerate(groups):
        anchor = embeddings[rows[0]]
        documents, own_positive = _documents(embeddings, groups, g, options.use_batch)
        logits = documents @ anchor / options.temperature
        losses.append(-torch.log_softmax(logits, dim=0)[own_positive])
    return torch.stack(losses).mean()


def _documents(embeddings: Tensor, groups: list[range], g: int, use_batch: bool) -> tuple[Tensor, int]:
    """The candidates for group g's anchor, and where its own positive stands among them."""
    if not use_batch:
        return torch.stack([embeddings[row] for row in groups[g][1:]]), 0
    rows = [row for group in groups for row in group[1:]]
    return embeddings[torch.tensor(rows)], rows.index(groups[g][1])
