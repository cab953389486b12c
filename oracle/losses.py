"""Losses by definition: plain loops over groups, one candidate list for each anchor.

Written from the definitions; worked values stand in tests/oracle/test_losses.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from oracle.case import Options

MARGIN = 0.5  # of the contrastive losses


class LossInputError(ValueError):
    """Labels, rows or embeddings that do not belong together; names the group and the counts."""


def loss(embeddings: Tensor, labels: Sequence[float], options: Options) -> Tensor:
    """The loss that ``options`` ask for.

    Args:
        embeddings: [rows, d], pooled and L2-normalised.
        labels: for groups see ``group_rows``; for pairs one for each pair of rows.

    Raises:
        LossInputError: rows and labels do not fit, or a row is NaN or zero.
    """
    if options.matryoshka:
        return matryoshka(embeddings, labels, options)
    if options.loss == "cosine_similarity":
        return cosine_similarity(embeddings, labels)
    if options.loss == "contrastive":
        return contrastive(embeddings, labels)
    if options.loss == "online_contrastive":
        return online_contrastive(embeddings, labels)
    if options.loss == "qwen3":
        return qwen3(embeddings, labels, options)
    return infonce(embeddings, labels, options)


# --- groups -----------------------------------------------------------------------------------------


def group_rows(labels: Sequence[float], rows: int) -> list[list[int]]:
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
    return [list(range(start + g, end + g + 1)) for g, (start, end) in enumerate(zip(starts, ends, strict=True))]


def _first_misfit(starts: list[int], labels: int, rows: int) -> str:
    last_rows = [end + g for g, end in enumerate([*starts[1:], labels])]
    for g, last in enumerate(last_rows):
        if last >= rows:
            return f"Group {g} is the first without all its rows: it would end at row {last}."
    return f"Row {labels + len(starts)} belongs to no group."


def with_hard_negatives(groups: list[list[int]], options: Options) -> list[list[int]]:
    """Each group's rows with exactly ``hard_negatives`` negatives.

    More: the first are kept. Fewer: the missing ones are drawn with replacement from the group's own,
    group after group, by one generator seeded with ``resample_seed``. (ms-swift up to 4.5.3 drew from
    positive and negatives but the last.) A group without negatives is refused.
    """
    if options.hard_negatives is None:
        return groups
    generator = torch.Generator().manual_seed(options.resample_seed)
    result = []
    for g, rows in enumerate(groups):
        negatives = rows[2:]
        if not negatives:
            raise LossInputError(
                f"group {g} has no negative where {options.hard_negatives} hard negatives are asked for"
            )
        missing = max(0, options.hard_negatives - len(negatives))
        drawn = torch.randint(len(negatives), (missing,), generator=generator).tolist()
        result.append([*rows[:2], *negatives[: options.hard_negatives], *(negatives[i] for i in drawn)])
    return result


def check_embeddings(embeddings: Tensor, groups: list[list[int]]) -> None:
    """Refuses rows of NaN or zeros, naming the row and its group."""
    for g, rows in enumerate(groups):
        for row in rows:
            if bool(torch.isnan(embeddings[row]).any()):
                raise LossInputError(f"embedding {row} of group {g} holds NaN")
            if not bool(embeddings[row].any()):
                raise LossInputError(f"embedding {row} of group {g} is zero: it has no direction")


def infonce(embeddings: Tensor, labels: Sequence[float], options: Options) -> Tensor:
    """InfoNCE (van den Oord et al., 2018) with ms-swift 4.6.0's options; the mean of the groups' losses.

    Candidates of an anchor q with positive p, similarity being the dot product:
    without use_batch its own documents (positive and negatives), and nothing else has any effect;
    with use_batch all groups' documents, then
      include_qq: the other anchors; include_dd: all documents but p, compared with p;
      mask_fake_negative: of documents and anchors those with s(q, .) > s(q, p) + margin are left out.
    The loss is the cross entropy of the similarities over temperature, the target being p.

    Example: orthogonal anchor and negative, positive equal to the anchor, T = 1, gives
    -log(e / (e + 1)) = 0.3133.
    """
    groups = group_rows(labels, len(embeddings))
    check_embeddings(embeddings, groups)
    groups = with_hard_negatives(groups, options)
    documents = [row for rows in groups for row in rows[1:]]
    losses = []
    for g, rows in enumerate(groups):
        anchor, positive = embeddings[rows[0]], embeddings[rows[1]]
        if options.use_batch:
            target = sum(len(other) - 1 for other in groups[:g])
            similarities = [_masked(_similar(embeddings, documents, anchor), target, options)]
            if options.include_qq:
                others = _similar(embeddings, [other[0] for other in groups], anchor)
                threshold = similarities[0][target].detach() + options.fake_negative_margin
                if options.mask_fake_negative:
                    others = torch.where(others > threshold, -torch.inf, others)
                similarities.append(_without(others, [g]))
            if options.include_dd:
                similarities.append(_without(_similar(embeddings, documents, positive), [target]))
        else:
            target = 0
            similarities = [_similar(embeddings, rows[1:], anchor)]
        logits = torch.cat(similarities) / options.temperature
        losses.append(-torch.log_softmax(logits, dim=0)[target])
    return torch.stack(losses).mean()


def _similar(embeddings: Tensor, rows: list[int], vector: Tensor) -> Tensor:
    """Dot products of some rows with one vector."""
    return embeddings[torch.tensor(rows, device=embeddings.device)] @ vector


def _masked(similarities: Tensor, target: int, options: Options) -> Tensor:
    """Suspiciously similar candidates left out; the threshold carries no gradient."""
    if not options.mask_fake_negative:
        return similarities
    threshold = similarities[target].detach() + options.fake_negative_margin
    return torch.where(similarities > threshold, -torch.inf, similarities)


def _without(similarities: Tensor, places: list[int]) -> Tensor:
    """The similarities with some places left out."""
    out = torch.zeros(len(similarities), dtype=torch.bool, device=similarities.device)
    for place in places:
        out[place] = True
    return torch.where(out, -torch.inf, similarities)


def qwen3(
    embeddings: Tensor, labels: Sequence[float], options: Options, identities: Sequence[Hashable] | None = None
) -> Tensor:
    """The improved contrastive loss of the Qwen3-Embedding report (arXiv 2506.05176, equation 1).

    Candidates of anchor i: its positive; its own hard negatives; the other anchors; and every document
    d_j of another group twice, compared with the anchor and with the positive. A candidate is left out
    (m = 0) where s(q_i, .) > s(q_i, p_i) + margin, the document's own similarity deciding for both its
    terms, or where the document is the same text as p_i. "Documents" are read as positives and negatives.

    ms-swift's include_qq, include_dd and mask_fake_negative differ: there the positive is compared with
    its own negatives too, those terms are never masked, and equal texts are not looked for.

    Args:
        identities: one for each row; equal ones are the same text. None: all rows differ.
    """
    groups = group_rows(labels, len(embeddings))
    check_embeddings(embeddings, groups)
    groups = with_hard_negatives(groups, options)
    names = list(range(len(embeddings))) if identities is None else list(identities)
    losses = []
    for g, (anchor_row, positive_row, *negatives) in enumerate(groups):
        anchor, positive = embeddings[anchor_row], embeddings[positive_row]
        own = _similar(embeddings, [positive_row, *negatives], anchor)
        threshold = own[0].detach() + options.fake_negative_margin
        same = torch.tensor([False, *(names[row] == names[positive_row] for row in negatives)], device=own.device)
        parts = [torch.where(same | (own > threshold), -torch.inf, own)]
        anchors = [rows[0] for other, rows in enumerate(groups) if other != g]
        documents = [row for other, rows in enumerate(groups) if other != g for row in rows[1:]]
        if anchors:
            to_anchors = _similar(embeddings, anchors, anchor)
            to_documents = _similar(embeddings, documents, anchor)
            same = torch.tensor([names[row] == names[positive_row] for row in documents], device=own.device)
            out = same | (to_documents > threshold)
            parts.append(torch.where(to_anchors > threshold, -torch.inf, to_anchors))
            parts.append(torch.where(out, -torch.inf, _similar(embeddings, documents, positive)))
            parts.append(torch.where(out, -torch.inf, to_documents))
        logits = torch.cat(parts) / options.temperature
        losses.append(-torch.log_softmax(logits, dim=0)[0])
    return torch.stack(losses).mean()


def matryoshka(embeddings: Tensor, labels: Sequence[float], options: Options) -> Tensor:
    """Matryoshka representation learning (Kusupati et al., 2022): each prefix's loss, weighted, summed."""
    plain = Options(**{**options.__dict__, "matryoshka": ()})
    total = []
    for dimensions, weight in options.matryoshka:
        if dimensions > embeddings.shape[1]:
            raise LossInputError(f"matryoshka asks for {dimensions} dimensions of {embeddings.shape[1]}")
        prefix = torch.nn.functional.normalize(embeddings[:, :dimensions], dim=-1, eps=1e-12)
        total.append(weight * loss(prefix, labels, plain))
    return torch.stack(total).sum()


# --- pairs ------------------------------------------------------------------------------------------


def cosines(embeddings: Tensor, labels: Sequence[float]) -> Tensor:
    """The cosine of each pair: rows 0 and 1, 2 and 3, ..."""
    if not labels:
        raise LossInputError("no labels: a loss needs at least one pair")
    if len(embeddings) != 2 * len(labels):
        raise LossInputError(
            f"{len(embeddings)} embeddings do not fit {len(labels)} pairs, which need {2 * len(labels)}"
        )
    check_embeddings(embeddings, [[2 * i, 2 * i + 1] for i in range(len(labels))])
    unit = torch.nn.functional.normalize(embeddings, dim=-1, eps=1e-12)
    return torch.stack([unit[2 * i] @ unit[2 * i + 1] for i in range(len(labels))])


def cosine_similarity(embeddings: Tensor, labels: Sequence[float]) -> Tensor:
    """Mean of (cosine - label)^2."""
    errors = [(cosine - label) ** 2 for cosine, label in zip(cosines(embeddings, labels), labels, strict=True)]
    return torch.stack(errors).mean()


def contrastive(embeddings: Tensor, labels: Sequence[float]) -> Tensor:
    """Hadsell et al., 2006: mean of (y d^2 + (1 - y) relu(margin - d)^2) / 2 with d = 1 - cosine."""
    terms = []
    for cosine, label in zip(cosines(embeddings, labels), labels, strict=True):
        distance = 1 - cosine
        terms.append(0.5 * (label * distance**2 + (1 - label) * torch.relu(MARGIN - distance) ** 2))
    return torch.stack(terms).mean()


def online_contrastive(embeddings: Tensor, labels: Sequence[float]) -> Tensor:
    """The contrastive loss of hard pairs only, summed (sentence-transformers' OnlineContrastiveLoss).

    Hard negatives are nearer than the farthest positive (if there are two or more, else than the
    negatives' mean); hard positives are farther than the nearest negative (likewise).
    """
    for i, label in enumerate(labels):
        if label not in (0, 1):
            raise LossInputError(f"pair {i} has the label {label}; online_contrastive needs 0 or 1")
    distances = 1 - cosines(embeddings, labels)
    far = [d for d, label in zip(distances, labels, strict=True) if label == 0]
    near = [d for d, label in zip(distances, labels, strict=True) if label == 1]
    terms = [distances.sum() * 0]
    if far:
        limit = torch.stack(near).amax() if len(near) > 1 else torch.stack(far).mean()
        terms += [torch.relu(MARGIN - d) ** 2 for d in far if bool(d < limit)]
    if near:
        limit = torch.stack(far).amin() if len(far) > 1 else torch.stack(near).mean()
        terms += [d**2 for d in near if bool(d > limit)]
    return torch.stack(terms).sum()
