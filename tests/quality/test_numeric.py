"""The numeric level's table: noise below every bound, faults above it, both measured again on a sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree
from impl.encoder import encode
from oracle import numeric
from oracle.strategies import cases
from oracle.suite import Status, try_law
from oracle.tolerances import NUMERIC
from tests.drawing import drawn
from tests.faults.pooling import SecondLastPooled
from tests.quality.numeric import FAULT_CASES, TEXT, effects, noise

CASES = 48
PAIRS = sorted(NUMERIC)
ON_CUDA = [  # the varlen kernels want half precision
    (dtype, model, backend)
    for dtype, model in PAIRS
    for backend in (("sdpa",) if dtype == "float32" else ("sdpa", "varlen", "flash_attn"))
]


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


class Elsewhere(PaddingFree):
    """The model and the stream on another device, the embeddings brought back."""

    def __init__(self, device: str, backend: str | None = None):
        super().__init__(backend)
        self.device = device

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        moved = copy.deepcopy(model).to(self.device)  # type: ignore[arg-type]
        return encode(moved, self.pack(model, sequences, layout), pooling, self.backend).cpu()


def _holds_elsewhere(dtype: str, model: str, device: str, backend: str, examples: int) -> None:
    result = try_law(numeric.law_of(dtype), Elsewhere(device, backend), model, examples)
    assert result.status is Status.HOLDS, result.finding


def test_the_gpu_test_runs_as_far_as_a_cpu_goes() -> None:
    _holds_elsewhere("bfloat16", "qwen3", "cpu", "sdpa", 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "model", "backend"), ON_CUDA, ids=["-".join(each) for each in ON_CUDA])
def test_every_back_end_on_cuda_stays_within_the_bound(dtype: str, model: str, backend: str) -> None:
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    _holds_elsewhere(dtype, model, "cuda", backend, 40)
