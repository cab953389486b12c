"""Boundaries: the lengths recovered are the lengths packed, or the stream is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oracle.case import Case, Stream
from oracle.laws.law import Broken, law, picture
from oracle.layout import packed_stream
from oracle.models import VOCABULARY


def _recovered(implementation: Any, positions: list[int], expected: list[int]) -> None:
    try:
        found = [int(n) for n in implementation.boundaries(torch.tensor(positions))]
    except NotImplementedError:
        raise
    except Exception as error:
        raise Broken(f"a well-formed stream of {len(expected)} sequences was refused: {error}") from error
    if found != expected:
        wrong = next(
            (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
        )
        raise Broken(
            f"{len(expected)} sequences packed, {len(found)} found; the first wrong one is sequence {wrong}",
            [
                f"as packed  {picture(positions, expected)}  lengths {_short(expected)}",
                f"as found   {picture(positions, found)}  lengths {_short(found)}",
            ],
        )


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 24 else f"{numbers[:20]} and {len(numbers) - 20} more"


def _stream(case: Case, layout: Stream) -> tuple[list[int], list[int]]:
    """Position ids of the case's sequences, and the lengths in stream order."""
    stream = packed_stream(case.sequences, layout, VOCABULARY)
    lengths = [case.lengths[i] for i in layout.arranged(len(case.lengths))]
    return stream.position_ids.tolist(), lengths


@law("boundaries", share=120)
def lengths_are_recovered(implementation: Any, case: Case) -> None:
    """Position ids give back the lengths packed, sequences of one token included."""
    _recovered(implementation, *_stream(case, Stream(case.stream.order)))


@law("boundaries", share=80)
def slots_at_the_tail_change_nothing(implementation: Any, case: Case) -> None:
    """Slots of -1 at the end of the stream belong to no sequence."""
    _recovered(implementation, *_stream(case, Stream(case.stream.order, tail=max(2, case.stream.tail))))


@law("boundaries", share=80)
def slots_after_each_sequence_change_nothing(implementation: Any, case: Case) -> None:
    """Slots of -1 after a sequence belong to no sequence."""
    each, tail = max(2, case.stream.each), case.stream.tail
    _recovered(implementation, *_stream(case, Stream(case.stream.order, tail=tail, each=each)))


@law("boundaries", share=80)
def cu_seqlens_give_the_lengths(implementation: Any, case: Case) -> None:
    """Explicit cumulative lengths give back the lengths packed."""
    ends = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
    try:
        found = [int(n) for n in implementation.boundaries(cu_seqlens=ends)]
    except NotImplementedError:
        raise
    except Exception as error:
        raise Broken(f"cu_seqlens {ends.tolist()} were refused: {error}") from error
    if found != case.lengths:
        raise Broken(f"cu_seqlens {ends.tolist()} gave lengths {_short(found)}, expected {_short(case.lengths)}")


def _refused(recover: Callable[[], list[int]], what: str, shown: str) -> None:
    try:
        found = recover()
    except NotImplementedError:
        raise
    except Exception:
        return
    raise Broken(f"not refused: {what}; it gave lengths {_short([int(n) for n in found])}", [shown])


@law("boundaries", share=60)
def what_cannot_be_split_is_refused(implementation: Any, case: Case) -> None:
    """Position ids that no packing of whole sequences gives are refused, never guessed at."""
    positions, _ = _stream(replace(case, stream=Stream(case.stream.order)), Stream(case.stream.order))
    for what, wrong in _unsplittable(positions):
        ids = torch.tensor(wrong, dtype=torch.int64)
        _refused(partial(implementation.boundaries, ids), what, f"position ids {picture(wrong)}")


def _unsplittable(positions: list[int]) -> list[tuple[str, list[int]]]:
    longest = max(positions)
    broken = [
        ("an empty stream", []),
        ("a slot before the first sequence", [-1, *positions]),
        ("a stream of slots alone", [-1] * len(positions)),
        ("a sequence that does not begin at 0", [p + 1 if p >= 0 else p for p in positions]),
        ("a sequence that skips a position", [*positions, 0, 2]),
        ("a sequence that goes on after slots", [*positions, 0, -1, 1]),
        ("a position below -1", [*positions, -2]),
    ]
    if longest > 0:
        last = len(positions) - 1 - positions[::-1].index(longest)
        broken.append(("a position that stands still", [*positions[: last + 1], longest, *positions[last + 1 :]]))
    return broken


@law("boundaries", share=60)
def malformed_cu_seqlens_are_refused(implementation: Any, case: Case) -> None:
    """Cumulative lengths that do not start at 0, fall, or hold an empty sequence are refused."""
    ends = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
    middle = len(ends) // 2
    repeated = torch.cat([ends[: middle + 1], ends[middle:]])
    swapped = ends.clone()
    swapped[-1], swapped[-2] = ends[-2], ends[-1]
    wrong: list[tuple[str, Tensor]] = [
        ("cu_seqlens that start at 1", ends + 1),
        ("cu_seqlens that fall", swapped),
        ("cu_seqlens with an empty sequence", repeated),
        ("cu_seqlens without a sequence", ends[:1]),
    ]
    for what, values in wrong:
        _refused(partial(implementation.boundaries, cu_seqlens=values), what, f"cu_seqlens {values.tolist()}")
