"""Agreement: what is computed without padding equals what is computed with it, in every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle import reference
from oracle.case import Case, Rows
from oracle.contract import training_step
from oracle.exact import exact
from oracle.laws.law import Broken, VacuousError, law
from oracle.models import kind, tiny
from oracle.outcome import Difference, Outcome, compare, compare_embeddings


def _layouts(case: Case) -> list[str]:
    stream, rows = case.stream, case.rows
    lines = [f"lengths {case.lengths}"]
    if stream.order is not None:
        lines.append(f"stream order {list(stream.order)}")
    if stream.tail > 1 or stream.each > 1:
        lines.append(f"slots to a multiple of {stream.each} after each sequence, of {stream.tail} at the tail")
    lines.append(f"padded reference: {rows.side}, {rows.extra} extra columns, {'junk' if rows.junk else 'pad ids'}")
    return lines


def _refuse(difference: Difference | None, case: Case, against: str) -> None:
    if difference is not None:
        raise Broken(f"{difference} ({against})", _layouts(case))


def _encoded(implementation: Any, case: Case) -> Tensor:
    model = tiny(case.model, case.seed)
    with exact():
        found: Tensor = implementation.encode(model, case.sequences, case.stream, case.options.pooling)
    return found.detach()


def _expected(case: Case, layout: Rows | None) -> Tensor:
    model = tiny(case.model, case.seed)
    with exact():
        return reference.encode(
            model, case.sequences, layout, case.options.pooling, kind(case.model).first_position
        ).detach()


@law("encode", share=10)
def every_sequence_has_one_embedding(implementation: Any, case: Case) -> None:
    """There are as many embeddings as sequences, each finite and of unit length."""
    found = _encoded(implementation, case)
    if len(found) != len(case.sequences):
        raise Broken(f"{len(case.sequences)} sequences gave {len(found)} embeddings", _layouts(case))
    for i, norm in enumerate(found.norm(dim=1).tolist()):
        if not abs(norm - 1) < 1e-5:  # rounding to the grid moves a unit vector's length by less
            raise Broken(f"sequence {i}'s embedding has length {norm}, not 1", _layouts(case))


@law("encode", share=30)
def embeddings_equal_the_padded_ones(implementation: Any, case: Case) -> None:
    """Every embedding equals, bit for bit, the one computed on padded rows."""
    difference = compare_embeddings(_expected(case, case.rows), _encoded(implementation, case))
    _refuse(difference, case, "against padded rows")


@law("encode", share=8, beyond=256)
def positions_beyond_256_equal_the_padded_ones(implementation: Any, case: Case) -> None:
    """So does that of a text of more than 256 tokens, where bfloat16 no longer holds every position."""
    if kind(case.model).longest <= 256:
        raise NotImplementedError
    difference = compare_embeddings(_expected(case, case.rows), _encoded(implementation, case))
    _refuse(difference, case, "against padded rows")


@law("encode", share=24, pooling="any", longest=16)
def every_pooling_equals_the_padded_one(implementation: Any, case: Case) -> None:
    """So it does for every pooling: first token, maximum, mean, mean over the root of the length, weighted."""
    difference = compare_embeddings(_expected(case, case.rows), _encoded(implementation, case))
    _refuse(difference, case, f"{case.options.pooling} pooling, against padded rows")


@law("encode", share=7, longest=12)
def embeddings_equal_each_sequence_alone(implementation: Any, case: Case) -> None:
    """Every embedding equals, bit for bit, the one computed with its sequence alone."""
    difference = compare_embeddings(_expected(case, None), _encoded(implementation, case))
    _refuse(difference, case, "against each sequence alone")


@law("encode", share=7, longest=12)
def the_last_token_is_pooled(implementation: Any, case: Case) -> None:
    """With last-token pooling the embedding is the last token's hidden state, found by length alone."""
    model = tiny(case.model, case.seed)
    first = kind(case.model).first_position
    found = _encoded(implementation, replace(case, options=replace(case.options, pooling="last")))
    states = []
    with exact(), reference.attention(model, "eager"):
        for ids in case.sequences:
            positions = torch.arange(first, first + len(ids)).unsqueeze(0)
            states.append(model(torch.tensor([ids]), position_ids=positions).last_hidden_state[0, len(ids) - 1])
        expected = torch.stack(states).detach()
        expected = expected / expected.norm(dim=1, keepdim=True)
    _refuse(compare_embeddings(expected, found), case, "against the hidden state at the last index")


@law("step", "encode", share=36, contrast=True, pooling="mostly last")
def a_training_step_equals_the_padded_one(implementation: Any, case: Case) -> None:
    """Loss, the gradient of every parameter and of the inputs equal, bit for bit, those of padded rows."""
    with exact():
        case, expected = padded_step(case)
        found = training_step(implementation, tiny(case.model, case.seed), case)
    _refuse(compare(expected, found), case, "against padded rows")


def warmed(case: Case) -> Case:
    """The case at a temperature that leaves something to learn."""
    return replace(case, options=replace(case.options, temperature=1.0))


def padded_step(case: Case) -> tuple[Case, Outcome]:
    """The reference's training step, inside a mode; the case warmed where a low temperature leaves no gradient.

    Raises VacuousError if there is none even so.
    """
    model = tiny(case.model, case.seed)
    expected = reference.step(model, case, case.rows)
    if not _has_gradient(expected):
        case = warmed(case)
        expected = reference.step(model, case, case.rows)
    if not _has_gradient(expected):
        raise VacuousError("a training step without any gradient")
    return case, expected


def _has_gradient(outcome: Outcome) -> bool:
    return any(bool(gradient.any()) for gradient in outcome.gradients.values())
