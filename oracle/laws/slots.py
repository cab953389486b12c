"""Slots: what stands between sequences, or behind them, belongs to none and reaches none."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle import reference
from oracle.case import Case, Stream
from oracle.contract import training_step
from oracle.exact import exact
from oracle.laws.law import Broken, law, picture
from oracle.layout import PackedStream, packed_stream
from oracle.models import VOCABULARY, input_embeddings, tiny
from oracle.outcome import compare, same


def accepts(surface: Any, *names: str) -> bool:
    """Whether a surface names all these arguments."""
    return inspect.signature(surface).parameters.keys() >= set(names)


def _layouts(case: Case) -> Iterator[tuple[str, Stream]]:
    order, junk = case.stream.order, case.stream.junk
    tail, each = max(2, case.stream.tail), max(2, case.stream.each)
    yield f"slots at the tail, to a multiple of {tail}", Stream(order, tail, 1, junk)
    yield f"slots after each sequence, to a multiple of {each}", Stream(order, 1, each, junk)
    yield f"slots after each sequence, to {each}, and at the tail, to {3 * each}", Stream(order, 3 * each, each, junk)
    yield f"pads at the tail numbered 0, 1, 2, ..., to a multiple of {tail}", Stream(order, tail, 1, junk, "counted")
    yield f"pads at the tail numbered 0, 0, 0, ..., to a multiple of {tail}", Stream(order, tail, 1, junk, "zeros")


def _in_order(case: Case, stream: PackedStream, layout: Stream) -> tuple[list[int], list[int]]:
    """Starts and lengths as they stand in the stream."""
    order = layout.arranged(len(case.sequences))
    return [stream.starts[i] for i in order], [stream.lengths[i] for i in order]


def _unpacked(
    implementation: Any, what: str, values: Tensor, stream: PackedStream, lengths: list[int]
) -> tuple[list[Tensor], list[str]]:
    shown = [f"{what}: {picture(stream.position_ids.tolist())}  lengths {lengths}"]
    pieces = list(implementation.unpack(values, stream.position_ids, lengths))
    if [len(piece) for piece in pieces] != lengths:
        raise Broken(f"pieces of {[len(piece) for piece in pieces]} tokens for lengths {lengths}", shown)
    return pieces, shown


@law("unpack", share=50)
def lengths_find_their_tokens_in_any_layout(implementation: Any, case: Case) -> None:
    """Given its lengths, a stream with slots anywhere, and pads numbered like a sequence, comes apart rightly."""
    for what, layout in _layouts(case):
        stream = packed_stream(case.sequences, layout, VOCABULARY)
        starts, lengths = _in_order(case, stream, layout)
        values = torch.arange(1.0, len(stream.input_ids) + 1, dtype=torch.float64).unsqueeze(1)
        pieces, shown = _unpacked(implementation, what, values, stream, lengths)
        for i, (start, piece) in enumerate(zip(starts, pieces, strict=True)):
            taken = [int(v) - 1 for v in piece.flatten().tolist()]
            if taken != list(range(start, start + lengths[i])):
                raise Broken(
                    f"sequence {i} of the stream stands at slots {start} to {start + lengths[i] - 1}, taken {taken}",
                    shown,
                )


@law("unpack", share=30)
def what_stands_in_slots_stays_there(implementation: Any, case: Case) -> None:
    """NaN in the slots reaches no sequence's values, and no gradient reaches a slot."""
    for what, layout in _layouts(case):
        stream = packed_stream(case.sequences, layout, VOCABULARY)
        starts, lengths = _in_order(case, stream, layout)
        real = [at for start, length in zip(starts, lengths, strict=True) for at in range(start, start + length)]
        values = torch.full((len(stream.input_ids), 1), torch.nan, dtype=torch.float64)
        values[real] = torch.arange(1.0, len(real) + 1, dtype=torch.float64).unsqueeze(1)
        leaf = values.clone().requires_grad_()
        pieces, shown = _unpacked(implementation, what, leaf, stream, lengths)
        found = torch.cat(pieces)
        if not same(found.detach(), values[real]):
            raise Broken(f"{int(found.isnan().sum())} of {len(real)} tokens came back as NaN", shown)
        (found * found.detach()).sum().backward()
        gradient = leaf.grad
        if gradient is None or not same(gradient, torch.nan_to_num(values)):
            told = None if gradient is None else gradient.flatten().tolist()
            raise Broken(f"the gradient of a stream with NaN in its slots is {told}", shown)


@law("step", "encode", share=8, contrast=True, longest=9)
def nan_in_slots_spoils_no_gradient(implementation: Any, case: Case) -> None:
    """Slots whose embeddings are NaN change no bit of a training step: no embedding, loss or gradient."""
    spoilt = VOCABULARY - 1
    groups = tuple(
        replace(
            group,
            anchor=_without(group.anchor, spoilt),
            positive=_without(group.positive, spoilt),
            negatives=tuple(_without(ids, spoilt) for ids in group.negatives),
        )
        for group in case.groups
    )
    each, tail = max(2, case.stream.each), max(2, case.stream.tail)
    case = replace(case, groups=groups, stream=replace(case.stream, each=each, tail=tail, slot=spoilt))
    model = copy.deepcopy(tiny(case.model, case.seed))
    with exact():
        expected = reference.step(model, case, case.rows)
        with torch.no_grad():
            input_embeddings(model).weight[spoilt] = torch.nan
        found = training_step(implementation, model, case)
    difference = compare(expected, found)
    if difference:
        raise Broken(
            f"{difference} (against padded rows)",
            [f"lengths {case.lengths}, slots to a multiple of {each} after each sequence, {tail} at the tail"],
        )


def _without(ids: tuple[int, ...], token: int) -> tuple[int, ...]:
    return tuple(5 if each == token else each for each in ids)


@law("boundaries", share=50)
def pads_numbered_like_a_sequence_are_refused(implementation: Any, case: Case) -> None:
    """Pads numbered 0, 1, 2, ... or all 0 read like sequences: with their number known the stream is refused."""
    if not accepts(implementation.boundaries, "count"):
        raise NotImplementedError
    count = len(case.sequences)
    for _, layout in _layouts(case):
        stream = packed_stream(case.sequences, layout, VOCABULARY)
        if layout.pads == "slots" or len(stream.input_ids) == sum(case.lengths):
            continue
        try:
            found = implementation.boundaries(stream.position_ids, count=count)
        except NotImplementedError:
            raise
        except Exception:
            continue
        shown = f"position ids {picture(stream.position_ids.tolist())}, {count} sequences packed"
        raise Broken(f"not refused: pads that read like a sequence; it gave lengths {[int(n) for n in found]}", [shown])
