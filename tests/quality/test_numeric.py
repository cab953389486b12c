"""The numeric level's table: noise below every bound, faults above it, both measured again on a sample."""

from __future__ import annotations

import pytest

from impl import PaddingFree
from oracle import numeric
from oracle.strategies import cases
from oracle.suite import Status, try_law
from oracle.tolerances import NUMERIC
from tests.drawing import drawn
from tests.faults.pooling import SecondLastPooled
from tests.quality.numeric import FAULT_CASES, TEXT, effects, noise

CASES = 48
PAIRS = sorted(NUMERIC)


def test_every_text_model_has_a_row_or_a_reason() -> None:
    assert {(dtype, model) for dtype in numeric.DTYPES for model in TEXT} == NUMERIC.keys() | numeric.WITHOUT


@pytest.mark.parametrize(("dtype", "model"), PAIRS, ids=[f"{dtype}-{model}" for dtype, model in PAIRS])
def test_the_gap_is_open(dtype: str, model: str) -> None:
    row, own = NUMERIC[dtype, model], drawn(cases(model, **numeric.DRAW), CASES, of=1)
    assert 2 * row.noise <= row.bound <= row.fault / 2
    found = noise([dtype], own)[dtype]
    assert found <= row.bound / 2, f"noise has grown to {found:.3g}"
    least = min(effects(dtype, own[:FAULT_CASES]).items(), key=lambda effect: effect[1])
    assert least[1] >= 2 * row.bound, f"{least[0]} moves an embedding by {least[1]:.3g} at most"


def test_the_law_of_a_precision_holds_for_the_right_and_kills_a_fault() -> None:
    law = numeric.law_of("bfloat16")
    assert try_law(law, PaddingFree(), "qwen3", 20).status is Status.HOLDS
    result = try_law(law, SecondLastPooled(), "qwen3", 40)
    assert result.status is Status.BROKEN
    assert result.finding is not None
    assert "in bfloat16, allowed" in result.finding.summary
    assert sum(result.finding.case.lengths) <= 5


def test_a_model_without_a_bound_is_declined() -> None:
    assert try_law(numeric.law_of("bfloat16"), PaddingFree(), "qwen3-moe", 3).status is Status.DECLINED
