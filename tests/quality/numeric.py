"""Measures the table of ``oracle.tolerances.NUMERIC``: python -m tests.quality.numeric prints it, for the file.

Noise: the greatest distance over so many clean cases, eight to a stream. Fault: of the planted faults below, each
one's greatest distance over FAULT_CASES cases, the smallest of those: a run sees the greatest. Bound: near
the geometric mean of both, a power of two or halfway between two.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from impl import PaddingFree
from oracle import numeric
from oracle.case import Case
from oracle.models import MODELS
from oracle.strategies import cases
from oracle.tolerances import Tolerance
from tests.drawing import drawn
from tests.faults.catalogue import catalogue
from tests.measuring import workers

CASES, FAULT_CASES = 10_000, 40
TEXT = [name for name, each in MODELS.items() if not each.visual and name != "qwen3-mha"]

# One of each kind that low precision can see in every model.
FAULTS = (
    "no-boundaries-in-attention",
    "one-key-of-the-neighbour",
    "first-key-hidden",
    "second-last-pooled",
    "first-token-pooled",
    "first-token-dropped",
    "stream-order",
    "normalised-by-the-batch",
)


TOGETHER = 8


def merged(own: list[Case]) -> Iterator[Case]:
    """Cases of one model seed, so many to a stream: a right embedding does not depend on its neighbours."""
    for seed in sorted({case.seed for case in own}):
        alike = [case for case in own if case.seed == seed]
        for start in range(0, len(alike), TOGETHER):
            batch = alike[start : start + TOGETHER]
            layout = replace(batch[0].stream, order=None)
            yield replace(batch[0], groups=tuple(group for case in batch for group in case.groups), stream=layout)


def noise(dtypes: Iterable[str], own: list[Case]) -> dict[str, float]:
    """The greatest distance of the right implementation, by dtype."""
    found = dict.fromkeys(dtypes, 0.0)
    for case in merged(own):
        for dtype in found:
            found[dtype] = max(found[dtype], *numeric.distances(PaddingFree(), case, dtype))
    return found


def effects(dtype: str, own: list[Case]) -> dict[str, float]:
    """Each fault's greatest distance."""
    made = {fault.id: fault.implementation() for fault in catalogue() if fault.id in FAULTS}
    return {name: max(max(numeric.distances(fault, case, dtype)) for case in own) for name, fault in made.items()}


def measured(model: str, count: int) -> dict[str, Tolerance]:
    """One model's rows of the table, by dtype."""
    own = drawn(cases(model, **numeric.DRAW), count, of=1)
    low = noise(numeric.DTYPES, own)
    high = {dtype: min(effects(dtype, own[:FAULT_CASES]).values()) for dtype in low}
    return {d: Tolerance(low[d], 2.0 ** (round(math.log2(low[d] * high[d])) / 2), high[d]) for d in low}


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.numeric", description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    count = parser.parse_args().cases
    with workers() as pool:
        rows = {model: pool.submit(measured, model, count) for model in TEXT}
        for model, row in rows.items():
            for dtype, found in row.result().items():
                told = f"noise={found.noise:.2g}, bound=2.0**{math.log2(found.bound):g}, fault={found.fault:.2g}"
                print(f'    ("{dtype}", "{model}"): Tolerance({told}),', flush=True)


if __name__ == "__main__":
    main()
