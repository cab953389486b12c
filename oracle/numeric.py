"""The numeric level: embeddings in low precision, where every right computation rounds and bits cannot decide.

Only for kernels that exact arithmetic cannot run. An embedding is compared with the float64 reference's; what is
further from it than ``tolerances.NUMERIC`` allows is a fault. The bound lies between the noise of right
computations and the effects of planted faults, both measured; a fault whose effect stays below the noise, such as
positions that rotary embedding hides, passes here and is found in exact arithmetic alone.
"""

from __future__ import annotations

import copy
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oracle import reference
from oracle.case import Case, Rows
from oracle.exact import plain
from oracle.laws.law import Broken, Law
from oracle.models import kind, tiny
from oracle.outcome import gap
from oracle.tolerances import NUMERIC

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAW = {"longest": 16}

# Which expert a token goes to is decided by rounding: no bound lies between that and a fault.
WITHOUT = {("bfloat16", "qwen3-moe"), ("float16", "qwen3-moe")}


@lru_cache(maxsize=32)
def lowered(name: str, seed: int, dtype: str) -> PreTrainedModel:
    """The small model in another precision."""
    return copy.deepcopy(tiny(name, seed)).to(DTYPES[dtype])


@lru_cache(maxsize=8)
def expected(case: Case) -> Tensor:
    """The padded reference's embeddings [n, d] in float64 throughout; kept for the next precision's turn."""
    model, position = tiny(case.model, case.seed), kind(case.model).first_position
    with plain(), torch.no_grad():
        return reference.encode(model, case.sequences, Rows(), case.options.pooling, position)


def distances(implementation: Any, case: Case, dtype: str) -> list[float]:
    """Each embedding's greatest difference from the reference's, with the model in ``dtype``."""
    model, wanted = lowered(case.model, case.seed, dtype), expected(case)
    with torch.no_grad():
        found = implementation.encode(model, case.sequences, case.stream, case.options.pooling)
    if found.shape != wanted.shape:
        return [float("inf")]
    return [gap(a, b) for a, b in zip(wanted, found, strict=True)]


@cache
def law_of(dtype: str) -> Law:
    """The law of one precision; not among ``LAWS``, which allow no difference at all."""

    def embeddings_are_within_their_bound(implementation: Any, case: Case) -> None:
        if (dtype, case.model) not in NUMERIC:
            raise NotImplementedError
        bound = NUMERIC[dtype, case.model].bound
        found = distances(implementation, case, dtype)
        worst = max(range(len(found)), key=found.__getitem__)
        if not found[worst] <= bound:
            raise Broken(
                f"sequence {worst}'s embedding is off by {found[worst]:.3g} in {dtype}, allowed {bound:.3g}",
                [f"lengths {case.lengths}"],
            )

    sentence = f"Embeddings in {dtype} are as near the float64 reference's as rounding explains."
    check = embeddings_are_within_their_bound
    return Law("numeric", f"{dtype}_{check.__name__}", sentence, ("encode",), check, DRAW)
