"""The vectorised InfoNCE: equal to its definition, and strict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from impl import infonce
from impl.errors import EmbeddingError, LabelError
from impl.losses import InfoNCE, contrastive, cosine_similarity, matryoshka, online_contrastive
from oracle.case import Options
from oracle.losses import qwen3
from tests.worked import LABELS, PAIRS, ROWS, pairs


def test_the_short_form_has_the_options_defaults() -> None:
    assert infonce(ROWS, LABELS).item() == InfoNCE()(ROWS, LABELS).item() == pytest.approx(2.142971, abs=5e-7)


PAIR_LOSSES = {each.__name__: each for each in (cosine_similarity, contrastive, online_contrastive)}


@pytest.mark.parametrize(
    ("temperature", "use_batch", "expected"),
    [(0.1, True, 2.142971), (0.01, True, 20.0), (1.0, True, 1.249748), (1.0, False, 0.371101)],
)
def test_worked_values(temperature: float, use_batch: bool, expected: float) -> None:
    for labels in (LABELS, torch.tensor(LABELS)):
        assert infonce(ROWS, labels, temperature, use_batch).item() == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(("name", "labels", "distances", "expected"), PAIRS)
def test_worked_values_of_pairs(name: str, labels: list[float], distances: list[float], expected: float) -> None:
    for given in (labels, torch.tensor(labels, dtype=torch.float32)):
        found = PAIR_LOSSES[name](pairs(distances), given)
        assert found.dtype == torch.float64
        assert found.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "rows", "message"),
    [
        ([], 0, "must begin with a positive.*found none"),
        ([0.0, 1.0], 3, "must begin with a positive.*found 0.0"),
        (LABELS, 5, "5 embeddings do not fit 4 labels in 2 groups, which need 6: group 1 lacks rows"),
        (LABELS, 2, "group 0 lacks rows"),
        (LABELS, 8, "row 6 belongs to no group"),
        ([1.0, *[0.0] * 256] * 2, 260, "260 embeddings do not fit 514 labels in 2 groups, which need 516"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: list[float], rows: int, message: str) -> None:
    with pytest.raises(LabelError, match=message):
        infonce(torch.zeros(rows, 2), labels)


def test_labels_may_be_a_tensor_and_are_named_as_numbers() -> None:
    with pytest.raises(LabelError, match=r"found 0\.0$"):
        infonce(torch.zeros(3, 2), torch.tensor([0.0, 1.0]))


def test_hard_negatives_without_any_are_refused() -> None:
    with pytest.raises(LabelError, match="group 1 has no negative where 2 hard negatives are asked for"):
        InfoNCE(hard_negatives=2)(ROWS[:5], [1.0, 0.0, 1.0])


def test_zero_is_refused() -> None:
    rows = ROWS.clone()
    rows[3] = 0
    with pytest.raises(EmbeddingError, match="embedding 3 of group 1 is zero"):
        infonce(rows, LABELS)


@pytest.mark.parametrize("loss", PAIR_LOSSES.values())
def test_pairs_that_do_not_fit_are_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(LabelError, match="6 embeddings do not fit 2 pairs, which need 4"):
        loss(ROWS, [1, 0])
    for row in (4, 5):
        rows = ROWS.clone()
        rows[row] = 0
        with pytest.raises(EmbeddingError, match=f"embedding {row} of group 2 is zero"):
            loss(rows, [1, 0, 1])
    wide = torch.tensor([1, 0, 1], dtype=torch.float64)
    assert loss(ROWS.float(), wide).dtype == torch.float32, "labels do not widen a loss"
    if loss is online_contrastive:
        with pytest.raises(LabelError, match=r"pair 1 has the label 0\.5"):
            loss(ROWS, [1, 0.5, 0])


def test_matryoshka_needs_the_dimensions() -> None:
    with pytest.raises(EmbeddingError, match="matryoshka asks for 3 dimensions of 2"):
        matryoshka(InfoNCE(), ROWS, LABELS, [(3, 1.0)])


@pytest.mark.parametrize("paper", [False, True])
def test_equal_texts_are_known_by_identity(paper: bool) -> None:
    identities = ["a", "b", "c", "d", "b", "e"]
    options = Options(loss="qwen3", temperature=1.0)
    loss = InfoNCE(temperature=1.0, paper=paper)
    if paper:
        assert loss(ROWS, LABELS, identities).item() == pytest.approx(qwen3(ROWS, LABELS, options, identities).item())
        assert loss(ROWS, LABELS, identities).item() != pytest.approx(loss(ROWS, LABELS).item())
    else:
        assert loss(ROWS, LABELS, identities).item() == loss(ROWS, LABELS).item()


class _Widest(TorchDispatchMode):
    """The largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(
    "options", [{}, {"include_qq": True, "include_dd": True, "mask_fake_negative": True}, {"paper": True}]
)
def test_chunks_never_hold_more_than_their_rows_of_similarities(options: dict[str, Any]) -> None:
    count, width, chunk = 64, 8, 4
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(3 * count, width, generator=generator)).requires_grad_()
    labels = [1.0, 0.0] * count
    widest = {}
    for size in (None, chunk):
        with _Widest() as mode:
            InfoNCE(chunk=size, **options)(rows, labels).backward()
        widest[size] = mode.elements
    parts = (2 if options else 1) * 2 * count + (count if options else 0)
    assert widest[None] == count * parts, "vacuous: the plain form holds all similarities"
    assert widest[chunk] <= max(chunk * parts, 3 * count * width)


def test_a_chunk_keeps_nothing_for_the_backward_pass_but_its_inputs() -> None:
    count, width = 32, 8
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(3 * count, width, generator=generator)).requires_grad_()

    def kept(chunk: int | None) -> set[int]:
        widths: set[int] = set()

        def keep(x: Tensor) -> Tensor:
            if x.is_floating_point() and x.dim() == 2:
                widths.add(x.shape[1])
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            InfoNCE(chunk=chunk)(rows, [1.0, 0.0] * count)
        return widths

    assert kept(4) == {width}
    assert 2 * count in kept(None), "vacuous: the plain form keeps all similarities"


def test_nan_is_refused_by_row() -> None:
    rows = ROWS.clone()
    rows[3, 0] = float("nan")
    with pytest.raises(EmbeddingError, match="embedding 3 of group 1 holds NaN"):
        infonce(rows, LABELS)
