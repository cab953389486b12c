"""Losses: equal to their definition, blind to the order of groups, and strict about labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle import losses
from oracle.case import Case, Options
from oracle.exact import exact
from oracle.laws.law import Broken, law
from oracle.outcome import gap, same

WIDTH = 16

# Sixteenths of a squared length of 1: rows of these entries, and their cosines, are exact.
ENTRIES = ([0.5] * 4, [0.75, 0.5, 0.25, 0.25, 0.25], [0.25] * 16, [0.75] + [0.25] * 7, [0.5] * 3 + [0.25] * 4)

DENSE = 2


def unit_rows(count: int, seed: int, dense: bool = False) -> Tensor:
    """[count, WIDTH] rows of length exactly 1, quarters in drawn places and with drawn signs.

    dense: nothing but quarters, so that no prefix is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(count, WIDTH, dtype=torch.float64)
    for row in rows:
        drawn = int(torch.randint(len(ENTRIES), (1,), generator=generator))
        entries = ENTRIES[DENSE if dense else drawn]
        places = torch.randperm(WIDTH, generator=generator)[: len(entries)]
        signs = 1 - 2 * torch.randint(2, (len(entries),), generator=generator)
        row[places] = torch.tensor(entries, dtype=torch.float64) * signs
    return rows


def _loss(implementation: Any, embeddings: Tensor, labels: list[float], case: Case) -> tuple[Tensor, Tensor]:
    """The implementation's loss and its gradient."""
    leaf = embeddings.clone().requires_grad_()
    loss = implementation.loss(leaf, labels, case.options)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def _equals_definition(implementation: Any, case: Case) -> None:
    rows = unit_rows(len(case.sequences), case.seed, dense=bool(case.options.matryoshka))
    with exact():
        found, gradient = _loss(implementation, rows, case.labels, case)
        leaf = rows.clone().requires_grad_()
        expected = losses.loss(leaf, case.labels, case.options)
        expected.backward()
    assert leaf.grad is not None
    if not same(expected.detach(), found):
        raise Broken(f"loss {found.item():.17g}, by definition {expected.item():.17g}", _shown(case))
    if not same(leaf.grad, gradient):
        row = next(i for i, (a, b) in enumerate(zip(leaf.grad, gradient, strict=True)) if not same(a, b))
        raise Broken(
            f"the gradient of embedding {row} is off by {gap(leaf.grad[row], gradient[row]):.3g}", _shown(case)
        )


@law("loss", share=50, contrast=True, longest=1)
def infonce_equals_its_definition(implementation: Any, case: Case) -> None:
    """InfoNCE and its gradient equal the plain loops over groups, bit for bit."""
    _equals_definition(implementation, case)


@law("loss", share=60, loss="infonce")
def every_option_equals_its_definition(implementation: Any, case: Case) -> None:
    """So they do with fake-negative masking, other anchors and documents against the positive."""
    _equals_definition(implementation, case)


@law("loss", share=30, loss="hard_negatives")
def hard_negatives_equal_their_definition(implementation: Any, case: Case) -> None:
    """A fixed number of hard negatives: the first ones kept, missing ones drawn from the group's own."""
    _equals_definition(implementation, case)


@law("loss", share=25, loss="matryoshka")
def matryoshka_equals_its_definition(implementation: Any, case: Case) -> None:
    """The weighted losses of renormalised prefixes, summed."""
    _equals_definition(implementation, case)


@law("loss", share=30, loss="qwen3")
def the_papers_formula_equals_its_definition(implementation: Any, case: Case) -> None:
    """The Qwen3-Embedding report's own loss and gradient, bit for bit."""
    _equals_definition(implementation, case)


@law("loss", share=10, loss="cosine_similarity")
def cosine_similarity_equals_its_definition(implementation: Any, case: Case) -> None:
    """The mean squared error of cosines against labels."""
    _equals_definition(implementation, case)


@law("loss", share=10, loss="contrastive")
def contrastive_equals_its_definition(implementation: Any, case: Case) -> None:
    """The contrastive loss of pairs."""
    _equals_definition(implementation, case)


@law("loss", share=15, loss="online_contrastive")
def online_contrastive_equals_its_definition(implementation: Any, case: Case) -> None:
    """The contrastive loss of hard pairs only."""
    _equals_definition(implementation, case)


@law("loss", share=30, contrast=True, longest=1)
def the_order_of_groups_does_not_matter(implementation: Any, case: Case) -> None:
    """Groups in reverse give the same loss, and each row the same gradient."""
    rows = unit_rows(len(case.sequences), case.seed)
    spans = losses.group_rows(case.labels, len(rows))
    backwards = replace(case, groups=tuple(reversed(case.groups)), stream=replace(case.stream, order=None))
    order = torch.tensor([row for span in reversed(spans) for row in span])
    with exact():
        loss, gradient = _loss(implementation, rows, case.labels, case)
        reversed_loss, reversed_gradient = _loss(implementation, rows[order], backwards.labels, case)
    if not same(loss, reversed_loss) or not same(gradient[order], reversed_gradient):
        raise Broken(
            f"loss {loss.item():.17g} became {reversed_loss.item():.17g} with the groups reversed", _shown(case)
        )


@law("loss", share=30, contrast=True, longest=1)
def labels_that_do_not_fit_are_refused(implementation: Any, case: Case) -> None:
    """A row too many or too few, or a first label of 0, is refused, never worked around."""
    rows, labels = unit_rows(len(case.sequences) + 1, case.seed), case.labels
    wrong = [
        ("one embedding too few", rows[:-2], labels),
        ("one embedding too many", rows, labels),
        ("a first group without a positive", rows[:-1], [0.0, *labels[1:], 0.0][: len(labels)]),
        ("no labels", rows[:0], []),
    ]
    for what, embeddings, given in wrong:
        try:
            loss = implementation.loss(embeddings, given, case.options)
        except NotImplementedError:
            raise
        except Exception:
            continue
        raise Broken(
            f"not refused: {what}; loss {float(loss):.6g}",
            [f"{len(embeddings)} embeddings, labels {given}"],
        )


def _shown(case: Case) -> list[str]:
    sizes = [len(group.sequences) for group in case.groups]
    default = Options()
    chosen = {k: v for k, v in vars(case.options).items() if v != getattr(default, k)}
    told = ", ".join(f"{k} {v}" for k, v in chosen.items()) or "the defaults"
    return [f"groups of {sizes} rows, labels {case.labels}; options: {told}"]
