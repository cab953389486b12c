"""Isolation: a sequence's embedding depends on no other sequence, and on nothing in a slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle.case import Case, Stream, distinct_ids
from oracle.exact import exact
from oracle.laws.law import Broken, VacuousError, law
from oracle.models import VOCABULARY, input_embeddings, tiny
from oracle.outcome import compare_embeddings, gap, same

Sequences = list[tuple[int, ...]]


def _encode(implementation: Any, case: Case, sequences: Sequences, layout: Stream) -> Tensor:
    model = tiny(case.model, case.seed)
    with exact():
        found: Tensor = implementation.encode(model, sequences, layout, case.options.pooling).detach()
    if len(found) != len(sequences):
        raise Broken(
            f"{len(sequences)} sequences gave {len(found)} embeddings", [f"lengths {[len(s) for s in sequences]}"]
        )
    return found


def _victim(case: Case) -> int:
    return case.seed % len(case.sequences)


@law("encode", share=12)
def other_sequences_tokens_do_not_matter(implementation: Any, case: Case) -> None:
    """Changing every token of every other sequence changes no bit of an embedding."""
    kept = _victim(case)
    changed = [ids if i == kept else tuple((t + 17) % VOCABULARY for t in ids) for i, ids in enumerate(case.sequences)]
    before = _encode(implementation, case, case.sequences, case.stream)
    after = _encode(implementation, case, changed, case.stream)
    if not same(before[kept], after[kept]):
        raise Broken(
            f"sequence {kept}'s embedding moved by {gap(before[kept], after[kept]):.3g} with the others' tokens",
            [f"lengths {case.lengths}, stream order {case.stream.arranged(len(changed))}"],
        )
    if same(before, after):
        raise VacuousError("no embedding moved at all although the tokens changed")


@law("encode", share=10, slots=False)
def order_does_not_matter(implementation: Any, case: Case) -> None:
    """Packing the sequences in another order gives every sequence the same embedding."""
    as_given = _encode(implementation, case, case.sequences, Stream())
    count = len(case.sequences)
    order = case.stream.order or tuple(reversed(range(count)))
    difference = compare_embeddings(as_given, _encode(implementation, case, case.sequences, Stream(order)))
    if difference:
        raise Broken(f"packed in the order {list(order)}: {difference}", [f"lengths {case.lengths}"])


@law("encode", share=16, shuffled=False)
def number_does_not_matter(implementation: Any, case: Case) -> None:
    """A sequence has the same embedding among many as among few, or without any other."""
    layout = replace(case.stream, order=None)
    many = _encode(implementation, case, case.sequences, layout)
    before = len(case.sequences) - 1 if case.seed % 2 else len(case.sequences) // 2
    few = _encode(implementation, case, case.sequences[before:], layout)
    difference = compare_embeddings(few, many[before:])
    if difference:
        raise Broken(f"with {before} sequences packed before them: {difference}", [f"lengths {case.lengths}"])


@law("encode", share=10)
def what_stands_in_slots_does_not_matter(implementation: Any, case: Case) -> None:
    """Slots, and the ids in them, change no bit of any embedding."""
    plain = _encode(implementation, case, case.sequences, Stream(case.stream.order))
    slots = replace(
        case.stream, tail=max(2, case.stream.tail), each=max(2, case.stream.each), junk=case.stream.junk + 1
    )
    difference = compare_embeddings(plain, _encode(implementation, case, case.sequences, slots))
    if difference:
        raise Broken(
            f"with slots to a multiple of {slots.each} after each sequence, {slots.tail} at the tail: {difference}",
            [f"lengths {case.lengths}"],
        )


@law("encode", share=12, longest=12)
def gradients_stay_within_the_sequence(implementation: Any, case: Case) -> None:
    """The gradient of an embedding with respect to another sequence's input is exactly zero."""
    model = tiny(case.model, case.seed)
    kept = _victim(case)
    own, foreign = _disjoint(case, kept)
    with exact():
        found = implementation.encode(model, own, case.stream, case.options.pooling)
        if len(found) != len(own):
            raise Broken(f"{len(own)} sequences gave {len(found)} embeddings", [f"lengths {case.lengths}"])
        table = input_embeddings(model).weight
        weights = torch.arange(1, found.shape[1] + 1, dtype=found.dtype) / 64
        (gradient,) = torch.autograd.grad((found[kept] * weights).sum(), table)
    if not gradient[list(own[kept])].any():
        raise VacuousError("an embedding without any gradient to its own input")
    leaked = [t for t in foreign if bool(gradient[t].any())]
    if leaked:
        owner = next(i for i, ids in enumerate(own) if leaked[0] in ids)
        raise Broken(
            f"sequence {kept}'s embedding has a gradient of {float(gradient[leaked[0]].abs().max()):.3g} "
            f"to the input of sequence {owner}",
            [f"lengths {case.lengths}, stream order {case.stream.arranged(len(own))}"],
        )


def _disjoint(case: Case, kept: int) -> tuple[Sequences, list[int]]:
    """The case's lengths with ids of which sequence ``kept`` shares none with the others; those others."""
    half = (VOCABULARY - 3) // 2
    own_ids = distinct_ids(half, half + 3)
    sequences = []
    for i, ids in enumerate(case.sequences):
        shift = 0 if i == kept else half
        sequences.append(tuple(own_ids[(t + j) % half] + shift for j, t in enumerate(ids)))
    return sequences, sorted({t for i, ids in enumerate(sequences) if i != kept for t in ids})
