"""Replay: passes in chunks, from a cache or computed again give the plain pass's gradient."""

from __future__ import annotations

from typing import Any

from oracle import reference
from oracle.case import Case
from oracle.exact import exact
from oracle.laws.law import Broken, law
from oracle.laws.losses import unit_rows
from oracle.losses import loss as by_definition
from oracle.models import tiny
from oracle.outcome import Outcome, compare, gap, same


def _piece(case: Case, whole: int) -> int:
    """How much at a time: every second time all but one, so that the last piece is short; else from 1 to beyond all."""
    return max(1, whole - 1) if case.seed % 2 else 1 + case.seed // 2 % (whole + 1)


@law("chunked_loss", share=30, loss="infonce")
def a_chunked_loss_equals_the_whole_one(implementation: Any, case: Case) -> None:
    """The loss computed some anchors at a time, and its gradient, equal the definition's, bit for bit."""
    rows, chunk = unit_rows(len(case.sequences), case.seed), _piece(case, len(case.groups))
    found, expected = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    with exact():
        chunked = implementation.chunked_loss(found, case.labels, case.options, chunk)
        chunked.backward()
        whole = by_definition(expected, case.labels, case.options)
        whole.backward()
    shown = [f"{len(case.groups)} groups, {chunk} at a time, options {case.options}"]
    assert found.grad is not None
    assert expected.grad is not None
    if not same(whole.detach(), chunked.detach()):
        raise Broken(f"loss {chunked.item():.17g} in chunks, {whole.item():.17g} as a whole", shown)
    if not same(expected.grad, found.grad):
        raise Broken(f"the gradient is off by {gap(expected.grad, found.grad):.3g}", shown)


@law("cached_step", share=6, contrast=True, longest=16)
def a_gradient_cache_equals_the_plain_step(implementation: Any, case: Case) -> None:
    """Embedding in mini-batches, one loss over all and a second pass give the plain step's gradients."""
    model, size = tiny(case.model, case.seed), _piece(case, len(case.sequences))
    with exact():
        made = implementation.cached_step(model, case, size)
        expected = reference.step(model, case, case.rows)
    difference = compare(expected, Outcome(made.embeddings, made.loss, made.gradients))
    if difference:
        raise Broken(f"{difference} (against padded rows)", [f"lengths {case.lengths}, {size} sequences at a time"])
