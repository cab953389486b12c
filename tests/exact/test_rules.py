"""Every rule against integers (sums, products) or arbitrary precision (curves, norms, softmax)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import mpmath
import pytest
import torch
from torch import Tensor

from oracle import exact
from oracle.exact import ExactError
from oracle.exact.elementary import FUNCTIONS
from oracle.exact.grid import snap
from oracle.exact.rules import RULES

aten = torch.ops.aten
Test = TypeVar("Test", bound=Callable[..., Any])
COVERED: set[str] = set()


def covers(*names: str) -> Callable[[Test], Test]:
    """Marks a test as the one of these rules."""

    def mark(test: Test) -> Test:
        COVERED.update(f"aten::{name}" if "::" not in name else name for name in names)
        return test

    return mark


def drawn(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Numbers that lie on no grid."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * spread


def units(x: Tensor, bits: int) -> list[Any]:
    """x snapped, as nested integers: multiples of 2^-bits."""
    return (snap(x, bits) * 2.0**bits).long().tolist()


def from_units(values: Any, bits: int) -> Tensor:
    """Nested integers back as floats, each correctly rounded by Fraction."""
    if isinstance(values, list):
        return torch.stack([from_units(v, bits) for v in values])
    return torch.tensor(float(Fraction(values, 2**bits)), dtype=torch.float64)


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The integer product of two snapped matrices."""
    rows, columns = units(a, 18), list(zip(*units(b, 18), strict=True))
    return from_units([[sum(x * y for x, y in zip(r, c, strict=True)) for c in columns] for r in rows], 36)


def int_sum(x: Tensor) -> Tensor:
    """The integer sum over the first dimension of a snapped [n, ...]."""
    flat = units(x.flatten(1), 36)
    return from_units([sum(column) for column in zip(*flat, strict=True)], 36).view(x.shape[1:])


def near(found: Tensor, expected: Tensor, bits: int = 16) -> None:
    """Within a few grid steps: for what is rounded in between."""
    assert found.dtype == torch.float64
    assert found.shape == expected.shape
    torch.testing.assert_close(
        found, expected.double(), rtol=0, atol=2.0**-bits * max(1.0, float(expected.abs().max()))
    )


# --- products ---------------------------------------------------------------------------------------


@covers("mm", "bmm", "mv", "dot", "vdot")
def test_products_are_the_integer_products() -> None:
    a, b = drawn(5, 7), drawn(7, 4, seed=1)
    expected = int_matmul(a, b)
    with exact():
        assert torch.equal(aten.mm(a, b), expected)
        assert torch.equal(aten.bmm(a[None].expand(2, 5, 7), b[None].expand(2, 7, 4)), expected.expand(2, 5, 4))
        assert torch.equal(aten.mv(a, b[:, 0]), expected[:, 0])
        assert torch.equal(aten.dot(a[0], b[:, 0]), expected[0, 0])
        assert torch.equal(aten.vdot(a[0], b[:, 0]), expected[0, 0])


@covers("addmm", "baddbmm", "addmv")
def test_a_bias_is_added_after_the_integer_product() -> None:
    a, b, bias = drawn(5, 7), drawn(7, 4, seed=1), drawn(4, seed=2)
    product = int_matmul(a, b)
    with exact():
        near(aten.addmm(bias, a, b), product + bias, 36)
        near(aten.addmm(bias, a, b, beta=2.0, alpha=-0.5), 2 * bias - product / 2, 34)
        near(aten.baddbmm(bias, a[None], b[None])[0], product + bias, 36)
        near(aten.addmv(drawn(5, seed=3), a, b[:, 0]), product[:, 0] + drawn(5, seed=3), 36)


@covers("_grouped_mm")
def test_grouped_products_are_the_products_of_the_groups() -> None:
    rows, experts, offs = drawn(6, 8), drawn(3, 8, 4, seed=1), torch.tensor([2, 2, 6], dtype=torch.int32)
    spans = [(0, 2, 0), (2, 2, 1), (2, 6, 2)]
    with exact():
        by_rows = aten._grouped_mm(rows, experts, offs)
        by_columns = aten._grouped_mm(experts.mT, rows.T, offs)
        inner = aten._grouped_mm(rows.T, drawn(6, 4, seed=2), offs)
        batched = aten._grouped_mm(drawn(3, 5, 8, seed=3), experts)
    for start, end, g in spans:
        if end > start:
            assert torch.equal(by_rows[start:end], int_matmul(rows[start:end], experts[g]))
            assert torch.equal(by_columns[:, start:end], int_matmul(experts[g].T, rows[start:end].T))
            assert torch.equal(inner[g], int_matmul(rows[start:end].T, drawn(6, 4, seed=2)[start:end]))
        assert torch.equal(batched[g], int_matmul(drawn(3, 5, 8, seed=3)[g], experts[g]))
    assert not inner[1].any()


@covers("convolution", "_convolution", "convolution_backward")
def test_convolution_is_the_matrix_product_of_its_windows() -> None:
    x, weight, bias = drawn(1, 3, 9).requires_grad_(), drawn(5, 3, 4, seed=1).requires_grad_(), drawn(5, seed=2)
    with exact():
        found = torch.nn.functional.conv1d(x, weight, bias.requires_grad_(), padding=3)
        found.sum().backward()
    windows = torch.nn.functional.pad(x.detach(), (3, 3)).unfold(2, 4, 1)[0].permute(1, 0, 2).flatten(1)
    near(found.detach()[0], (int_matmul(windows, weight.detach().flatten(1).T) + bias.detach()).T, 34)
    ones = torch.ones(12, 5, dtype=torch.float64)
    assert torch.equal(weight.grad.flatten(1), int_matmul(ones.T, windows))  # type: ignore[union-attr]
    assert torch.equal(bias.grad, torch.full((5,), 12.0, dtype=torch.float64))  # type: ignore[arg-type]
    spread = int_matmul(ones, weight.detach().flatten(1)).view(12, 3, 4)
    expected = torch.zeros(3, 15, dtype=torch.float64)
    for at in range(12):
        expected[:, at : at + 4] += spread[at]
    assert torch.equal(x.grad[0], expected[:, 3:-3])  # type: ignore[index]


@covers("linalg_solve_triangular")
def test_triangular_systems_are_solved_and_blind_to_rows_of_zeros_before_them() -> None:
    a, b = drawn(2, 9, 9), drawn(2, 9, 4, seed=1)
    for upper in (False, True):
        for left in (True, False):
            rhs = b if left else b.mT

            def solve(a: Tensor, upper: bool = upper, left: bool = left, rhs: Tensor = rhs) -> Tensor:
                return torch.linalg.solve_triangular(a, rhs, upper=upper, left=left, unitriangular=True)

            value, gradient, plain_value, plain_gradient = _autograd_pair(solve, a / 4)
            near(value, plain_value, 14)
            near(gradient, plain_gradient, 12)
    shifted = torch.nn.functional.pad(a, (3, 0, 3, 0)), torch.nn.functional.pad(b, (0, 0, 3, 0))
    with exact():
        alone = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
        after = torch.linalg.solve_triangular(*shifted, upper=False, unitriangular=True)
        with pytest.raises(ExactError, match="unitriangular=True only"):
            torch.linalg.solve_triangular(a, b, upper=False)
    assert torch.equal(after[:, 3:], alone)
    assert not after[:, :3].any()


# --- sums -------------------------------------------------------------------------------------------


@covers("sum", "mean", "cumsum")
def test_sums_are_the_integer_sums() -> None:
    x = drawn(50, 4, spread=40.0)
    with exact():
        assert torch.equal(x.sum(0), int_sum(x))
        assert torch.equal(x.sum(), int_sum(x.reshape(-1, 1))[0])
        assert torch.equal(x.cumsum(0)[-1], int_sum(x))
        near(x.mean(0), int_sum(x) / 50, 36)
        assert torch.equal(x.sum(0), x[torch.randperm(50, generator=torch.Generator().manual_seed(1))].sum(0))
        assert torch.ones(4, dtype=torch.bool).sum().item() == 4
        assert torch.arange(4).cumsum(0).tolist() == [0, 1, 3, 6]


@covers("var_mean.correction", "var.correction", "std.correction")
def test_variances_are_those_of_the_fractions() -> None:
    x = drawn(3, 9)
    exactly = [[Fraction(v) for v in row] for row in x.tolist()]
    means = [sum(row, Fraction(0)) / 9 for row in exactly]
    spreads = [sum((v - m) ** 2 for v in row) for row, m in zip(exactly, means, strict=True)]
    biased = torch.tensor([float(s / 9) for s in spreads], dtype=torch.float64)
    with exact():
        spread, centre = torch.var_mean(x, 1, correction=0)
        near(spread, biased, 30)
        near(centre, torch.tensor([float(m) for m in means], dtype=torch.float64), 34)
        near(torch.var(x, 1, correction=1), biased * 9 / 8, 30)
        near(torch.std(x, 1, correction=0), biased.sqrt(), 30)


@covers("linalg_vector_norm", "norm")
def test_norms() -> None:
    x = drawn(3, 9)
    with exact():
        near(
            torch.linalg.vector_norm(x, 2, 1),
            torch.tensor([mpmath.norm(r) for r in x.tolist()], dtype=torch.float64),
            30,
        )
        near(torch.linalg.vector_norm(x, 1, 1), int_sum(x.abs().T), 36)
        assert torch.equal(torch.linalg.vector_norm(x, float("inf"), 1), x.abs().amax(1))
        near(aten.norm(x, 2, [1]), x.pow(2).sum(1).sqrt(), 30)
        with pytest.raises(ExactError, match="order 3"):
            torch.linalg.vector_norm(x, 3)


@covers("index_add", "scatter_add", "scatter_reduce", "index_put", "_index_put_impl", "_unsafe_index_put")
def test_accumulating_scatters_are_integer_sums() -> None:
    source, index = drawn(6, 2), torch.tensor([0, 2, 0, 0, 2, 2])
    expected = torch.stack(
        [int_sum(source[index == i]) if bool((index == i).any()) else torch.zeros(2).double() for i in range(3)]
    )
    start = torch.zeros(3, 2, dtype=torch.float64)
    wide = index[:, None].expand(6, 2)
    with exact():
        assert torch.equal(start.index_add(0, index, source), expected)
        assert torch.equal(start.clone().index_add_(0, index, source), expected)
        near(start.index_add(0, index, source, alpha=2), 2 * expected, 34)
        assert torch.equal(start.scatter_add(0, wide, source), expected)
        assert torch.equal(start.scatter_reduce(0, wide, source, "sum"), expected)
        assert torch.equal(start.scatter_reduce(0, wide, source, "amax")[1], start[1])
        assert torch.equal(start.index_put((index,), source, accumulate=True), expected)
        assert torch.equal(aten._index_put_impl(start, [index], source, True), expected)
        assert torch.equal(aten._unsafe_index_put(start, [index], source, True), expected)
        assert torch.equal(start.index_put((torch.tensor([1]),), source[:1])[1], source[0])
        with pytest.raises(ExactError, match="prod"):
            start.scatter_reduce(0, wide, source, "prod")


@covers("embedding", "embedding_dense_backward")
def test_an_embeddings_gradient_is_the_sum_over_occurrences() -> None:
    table, ids = drawn(4, 3).requires_grad_(), torch.tensor([1, 3, 1, 0, 1])
    grad = drawn(5, 3, seed=1)
    with exact(loss_scale=0):
        out = torch.nn.functional.embedding(ids, table, padding_idx=0)
        out.backward(grad)
        with pytest.raises(ExactError, match="scale_grad_by_freq"):
            torch.nn.functional.embedding(ids, table, scale_grad_by_freq=True).sum().backward()
    assert torch.equal(out.detach(), snap(table.detach(), 36)[ids])
    expected = torch.zeros(4, 3, dtype=torch.float64)
    expected[1], expected[3] = int_sum(grad[ids == 1]), int_sum(grad[ids == 3])
    assert torch.equal(table.grad, expected)  # type: ignore[arg-type]


@covers("nll_loss_forward", "nll_loss_backward")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss_picks_and_adds(reduction: str, weighted: bool) -> None:
    log_p, target = snap(drawn(5, 3), 20).requires_grad_(), torch.tensor([0, 2, -100, 1, 2])
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64) if weighted else None
    plain = log_p.detach().clone().requires_grad_()
    with exact():
        found = torch.nn.functional.nll_loss(log_p, target, weight, reduction=reduction)
        found.sum().backward()
    expected = torch.nn.functional.nll_loss(plain, target, weight, reduction=reduction)
    expected.sum().backward()
    near(found.detach(), expected.detach(), 34)
    near(log_p.grad, plain.grad, 34)  # type: ignore[arg-type]


@covers("mse_loss", "mse_loss_backward")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_mse_loss(reduction: str) -> None:
    x, y = drawn(5, 3).requires_grad_(), drawn(5, 3, seed=1)
    plain = x.detach().clone().requires_grad_()
    with exact():
        found = torch.nn.functional.mse_loss(x, y, reduction=reduction)
        found.sum().backward()
    expected = torch.nn.functional.mse_loss(plain, y, reduction=reduction)
    expected.sum().backward()
    near(found.detach(), expected.detach(), 30)
    near(x.grad, plain.grad, 30)  # type: ignore[arg-type]


# --- curves -----------------------------------------------------------------------------------------


def rounded(name: str, values: list[float], bits: int = 24) -> Tensor:
    """The function at each value, to the nearest multiple of 2^-bits, with 60 digits."""
    with mpmath.workdps(60):
        units_ = [int(mpmath.nint(FUNCTIONS[name][1](mpmath.mpf(v)) * 2**bits)) for v in values]
    return from_units(units_, bits)


@covers(*(name for name in FUNCTIONS if name != "log_sigmoid"), "log_sigmoid_forward")
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_curves_are_correctly_rounded_to_the_grid(name: str) -> None:
    x = drawn(4000, spread=2.0)
    x = x.abs() + 2.0**-8 if name.startswith("log") and name != "log_sigmoid" else x
    call = torch.nn.functional.logsigmoid if name == "log_sigmoid" else FUNCTIONS[name][0]
    with exact():
        found = call(x)
    assert torch.equal(found, rounded(name, x.tolist()))


def test_where_hardware_leaves_the_rounding_open_more_digits_decide() -> None:
    """exp at points whose value lies within 2^-44 of the middle between two grid points."""
    with mpmath.workdps(60):
        middles = [float(mpmath.log((mpmath.mpf(k) + 0.5) / 2**24)) for k in range(9_000_000, 9_000_400)]
    x = torch.tensor(middles, dtype=torch.float64)
    with exact():
        found = torch.exp(x)
    assert torch.equal(found, rounded("exp", middles))


def test_curves_keep_infinities_and_nan() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0], dtype=torch.float64)
    with exact():
        found = torch.exp(x)
    assert found[0] == float("inf")
    assert found[1] == 0
    assert found[2].isnan()
    assert found[3] == 1


@covers("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def test_powers() -> None:
    x = drawn(20).abs() + 0.1
    with exact():
        near(x.pow(2), x * x, 34)
        near(x.pow(-0.5), x.sqrt().reciprocal(), 34)
        for exponent in (0, 1, 3, -1, 0.5):
            near(x.pow(exponent), torch.tensor([v**exponent for v in x.tolist()], dtype=torch.float64), 30)
        with mpmath.workdps(60):
            nearest = [int(mpmath.nint(mpmath.mpf(v) ** mpmath.mpf(1.7) * 2**24)) for v in x.tolist()]
            based = [int(mpmath.nint(mpmath.mpf(3) ** mpmath.mpf(v) * 2**24)) for v in x.tolist()]
        assert torch.equal(x.pow(1.7), from_units(nearest, 24))
        assert torch.equal(x.pow(torch.full_like(x, 1.7)), from_units(nearest, 24))
        assert torch.equal(torch.pow(3.0, x), from_units(based, 24))
        assert torch.arange(4).pow(2).tolist() == [0, 1, 4, 9]
        assert torch.arange(4).pow(torch.arange(4)).tolist() == [1, 1, 4, 27]


def _autograd_pair(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value and gradient under the mode, and in plain float64."""
    results: list[Tensor] = []
    for mode in (exact(), None):
        leaf = x.clone().requires_grad_()
        if mode:
            with mode:
                out = function(leaf)
                out.sum().backward()
        else:
            out = function(leaf)
            out.sum().backward()
        assert leaf.grad is not None
        results += [out.detach(), leaf.grad]
    return results[0], results[1], results[2], results[3]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu-tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log_sigmoid": torch.nn.functional.logsigmoid,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "rsqrt": lambda x: torch.rsqrt(x * x + 1),
    "sqrt": lambda x: torch.sqrt(x * x + 1),
    "reciprocal": lambda x: torch.reciprocal(x * x + 1),
    "square": torch.square,
    "relu": torch.relu,
}


@covers("silu", "silu_backward", "gelu", "gelu_backward", "softplus", "softplus_backward", "tanh_backward")
@covers("sigmoid_backward", "log_sigmoid_backward", "leaky_relu", "leaky_relu_backward", "rsqrt", "sqrt")
@covers("reciprocal", "square")
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_and_their_gradients(name: str) -> None:
    value, gradient, plain_value, plain_gradient = _autograd_pair(ACTIVATIONS[name], drawn(400))
    near(value, plain_value, 20)
    near(gradient, plain_gradient, 18)


@covers("add", "sub", "rsub", "mul", "div", "true_divide", "addcmul", "addcdiv", "lerp")
def test_elementwise_arithmetic_rounds_once_to_the_grid() -> None:
    x, y = drawn(50), drawn(50, seed=1)
    with exact():
        sums = [float(Fraction(a) + Fraction(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        assert torch.equal(x + y, snap(torch.tensor(sums, dtype=torch.float64), 36))
        near(torch.add(x, y, alpha=3), x + 3 * y, 36)
        near(torch.sub(x, y, alpha=3), x - 3 * y, 36)
        near(torch.rsub(x, y, alpha=3), y - 3 * x, 36)
        near(1 - x, torch.tensor([1 - v for v in x.tolist()], dtype=torch.float64), 36)
        products = torch.tensor(
            [float(Fraction(a) * Fraction(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)], dtype=torch.float64
        )
        assert torch.equal(x * y, snap(products, 36))
        quotients = torch.tensor(
            [float(Fraction(a) / Fraction(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)], dtype=torch.float64
        )
        near(x / y, quotients, 36)
        near(aten.true_divide(x, y), quotients, 36)
        near(torch.addcmul(x, x, y, value=2), x + 2 * products, 34)
        near(torch.addcdiv(x, x, y, value=2), x + 2 * quotients, 34)
        near(torch.lerp(x, y, 0.25), x + 0.25 * (y - x), 34)
        assert torch.equal(torch.div(x, y, rounding_mode="floor"), quotients.floor())


@covers("native_dropout", "native_dropout_backward")
def test_dropout_zeroes_or_scales() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        value, gradient, _, _ = _autograd_pair(
            lambda x: torch.native_dropout(x, 0.25, True)[0], torch.ones(400, dtype=torch.float64)
        )
    assert set(value.tolist()) == {0.0, snap(torch.tensor(1 / 0.75, dtype=torch.float64), 36).item()}
    assert torch.equal(value == 0, gradient == 0)
    assert 50 < int((value == 0).sum()) < 150
    with exact():
        assert torch.equal(torch.native_dropout(value, 0.25, False)[0], value)


# --- softmax, norms, attention ----------------------------------------------------------------------


@covers(
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp", "_safe_softmax"
)
def test_softmax_family() -> None:
    x = drawn(6, 9)
    x[0, :4] = -float("inf")
    x[1, 2] = torch.finfo(torch.float64).min
    weights = drawn(6, 9, seed=1)
    with mpmath.workdps(40):
        rows = [[mpmath.exp(v) for v in row] for row in x.tolist()]
        expected = torch.tensor([[float(v / mpmath.fsum(row)) for v in row] for row in rows], dtype=torch.float64)
    for call in (lambda t: torch.softmax(t, 1), lambda t: aten._safe_softmax(t, 1)):
        value, gradient, _, plain_gradient = _autograd_pair(lambda t, call=call: call(t) * weights, x)
        near(value, expected * weights, 20)
        near(gradient, plain_gradient, 18)
    for call in (
        lambda t: torch.log_softmax(t, 1)[1:],
        lambda t: torch.logsumexp(t, 1),
        lambda t: torch.logsumexp(t, 1, True),
    ):
        value, gradient, plain_value, plain_gradient = _autograd_pair(call, x.nan_to_num(neginf=-4.0).clamp(min=-30))
        near(value, plain_value, 20)
        near(gradient, plain_gradient, 18)


def test_a_fully_masked_row_is_zero_for_attention_and_nan_for_softmax() -> None:
    x = torch.full((2, 3), -float("inf"), dtype=torch.float64)
    with exact():
        assert not aten._safe_softmax(x, 1).any()
        assert torch.softmax(x, 1).isnan().all()
        assert torch.equal(torch.logsumexp(x, 1), torch.full((2,), -float("inf")).double())


def test_no_logits_at_all_are_what_torch_makes_of_them() -> None:
    """A loss over no documents: its own error is to be seen, not one of ours."""
    x = torch.empty(2, 0, dtype=torch.float64)
    with exact():
        assert torch.softmax(x, 1).shape == torch.log_softmax(x, 1).shape == (2, 0)
        assert torch.equal(torch.logsumexp(x, 1), torch.full((2,), -float("inf")).double())
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            torch.nn.functional.cross_entropy(x, torch.tensor([0, 0]))


def test_two_ways_to_write_cross_entropy_have_the_same_bits() -> None:
    logits, target = drawn(7, 11) / 0.1, torch.arange(7)
    with exact():
        picked = -torch.log_softmax(logits, 1)[torch.arange(7), target]
        assert torch.equal(picked.mean(), torch.nn.functional.cross_entropy(logits, target))


@covers("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 8), (8,)])
def test_norms_fused_and_their_gradients(affine: bool, shape: tuple[int, ...]) -> None:
    x, weights = drawn(*shape), drawn(*shape, seed=3)
    for norm in (torch.nn.LayerNorm(8, elementwise_affine=affine), torch.nn.RMSNorm(8, elementwise_affine=affine)):
        norm.double()
        gradients = []
        value, gradient, plain_value, plain_gradient = (None,) * 4
        for mode in (True, False):
            norm.zero_grad()
            leaf = x.clone().requires_grad_()
            with exact() if mode else torch.enable_grad():
                out = norm(leaf) * weights
                out.sum().backward()
            gradients.append([p.grad.clone() for p in norm.parameters() if p.grad is not None])
            if mode:
                value, gradient = out.detach(), leaf.grad
            else:
                plain_value, plain_gradient = out.detach(), leaf.grad
        near(value, plain_value, 24)  # type: ignore[arg-type]
        near(gradient, plain_gradient, 22)  # type: ignore[arg-type]
        for a, b in zip(*gradients, strict=True):
            near(a, b, 22)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """transformers' eager attention, [n, h, L, d], key heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(torch.float64).min)
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def _with_gradients(run: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    with exact():
        out = run(*leaves)
        (out * drawn(*out.shape, seed=9)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@covers("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
@pytest.mark.parametrize("backend", list(torch.nn.attention.SDPBackend.__members__.values()), ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "mask", "grouped"])
def test_every_sdpa_back_end_has_the_eager_computations_bits(backend: Any, kind: str) -> None:
    heads = 2 if kind == "grouped" else 4
    q, k, v = drawn(2, 4, 5, 8), drawn(2, heads, 5, 8, seed=1), drawn(2, heads, 5, 8, seed=2)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    mask = {"causal": lower, "mask": lower | torch.eye(5, dtype=torch.bool)[[4, 0, 1, 2, 3]]}.get(kind)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    given = None if kind == "causal" else mask

    def fused(*x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(backend):
            return sdpa(*x, attn_mask=given, is_causal=kind == "causal", scale=0.3, enable_gqa=kind == "grouped")

    expected = _with_gradients(lambda *x: eager(*x, mask, 0.3), q, k, v)
    for a, b in zip(expected, _with_gradients(fused, q, k, v), strict=True):
        assert torch.equal(a, b)
    if kind != "grouped":

        def direct(*x: Tensor) -> Tensor:
            out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
                *x, 0.0, kind == "causal", attn_mask=None if given is None else given.double().log(), scale=0.3
            )[0]
            return out

        for a, b in zip(expected, _with_gradients(direct, q, k, v), strict=True):
            assert torch.equal(a, b)


@covers("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_varlen_attention_has_the_bits_of_each_sequence_alone(window: tuple[int, int], key_heads: int) -> None:
    from torch.nn.attention.varlen import varlen_attn

    lengths = [1, 4, 1, 7]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = drawn(13, 4, 8), drawn(13, key_heads, 8, seed=1), drawn(13, key_heads, 8, seed=2)

    def alone(*x: Tensor) -> Tensor:
        outputs = []
        for parts in zip(*(t.split(lengths) for t in x), strict=True):
            qs, ks, vs = (t.transpose(0, 1)[None] for t in parts)
            distance = torch.arange(qs.shape[2])[None, :] - torch.arange(qs.shape[2])[:, None]
            seen = torch.ones_like(distance, dtype=torch.bool)
            seen &= (distance >= -window[0]) if window[0] >= 0 else seen
            seen &= (distance <= window[1]) if window[1] >= 0 else seen
            outputs.append(eager(qs, ks, vs, seen, 8**-0.5)[0].transpose(0, 1))
        return torch.cat(outputs)

    def packed(*x: Tensor) -> Tensor:
        out = varlen_attn(*x, cu, cu, 7, 7, window_size=window, enable_gqa=key_heads != 4)
        assert isinstance(out, Tensor)
        return out

    for a, b in zip(_with_gradients(alone, q, k, v), _with_gradients(packed, q, k, v), strict=True):
        assert torch.equal(a, b)


def test_every_rule_has_a_test() -> None:
    assert set(RULES) == COVERED, f"untested: {sorted(set(RULES) - COVERED)}; unknown: {sorted(COVERED - set(RULES))}"
