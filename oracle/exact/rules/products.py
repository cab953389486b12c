"""Sums of products: matrix products, convolutions, grouped matrix products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.exact.grid import Arithmetic, largest
from oracle.exact.rules.table import rule


@rule("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot", on_grid=True)
def product(exact: Arithmetic, a: Tensor, b: Tensor) -> Tensor:
    """a @ b."""
    return exact.product(a, b)


@rule("aten::ger", "aten::outer", on_grid=True)
def outer_product(exact: Arithmetic, a: Tensor, b: Tensor) -> Tensor:
    """a b^T, the gradient of a matrix-vector product."""
    return exact.product(a.unsqueeze(1), b.unsqueeze(0))


@rule("aten::addmm", "aten::baddbmm", "aten::addmv")
def biased_product(
    exact: Arithmetic, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """beta * bias + alpha * (a @ b), each step rounded on its own (no fused multiply-add)."""
    result = exact.product(a, b)
    if alpha != 1:
        result = result * alpha
    return result if beta == 0 else result + (bias if beta == 1 else bias * beta)


@rule("aten::_grouped_mm")
def grouped_product(
    exact: Arithmetic,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One product a group (mixture of experts); ``offs`` [groups] holds where each group ends.

    Rows [s, k] x [g, k, n] -> [s, n]; columns [g, m, k] x [k, s] -> [m, s]; inner [m, s] x [s, n] ->
    [g, m, n]; without offs a batch of products.
    """
    if offs is None:
        result = exact.product(a, b)
    else:
        ends = [int(e) for e in offs.tolist()]
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        if a.dim() == 2 and b.dim() == 3:
            result = a.new_zeros(a.shape[0], b.shape[2], dtype=torch.float64)
            for g, (start, end) in enumerate(spans):
                result[start:end] = exact.product(a[start:end], b[g])
        elif a.dim() == 3 and b.dim() == 2:
            result = a.new_zeros(a.shape[1], b.shape[1], dtype=torch.float64)
            for g, (start, end) in enumerate(spans):
                result[:, start:end] = exact.product(a[g], b[:, start:end])
        else:
            result = torch.stack([exact.product(a[:, start:end], b[start:end]) for start, end in spans])
    return result if bias is None else result + bias


def _charge_convolution(exact: Arithmetic, a: Tensor, b: Tensor, terms: int) -> None:
    exact.charge(terms * largest(a) * largest(b), exact.grid.addend, (a, b))


@rule("aten::convolution", "aten::_convolution")
def convolution(exact: Arithmetic, x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: object) -> Tensor:
    """Convolution of x [n, c, ...] with weight; torch's own float64 kernels, which add plain products."""
    x, weight = exact.operand(x), exact.operand(weight)
    _charge_convolution(exact, x, weight, math.prod(weight.shape[1:]))
    stride, padding, dilation, transposed, output_padding, groups = arguments[:6]
    result = torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    return result if bias is None else result + bias.view(-1, *[1] * (x.dim() - 2))


@rule("aten::convolution_backward")
def convolution_backward(
    exact: Arithmetic,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    *arguments: object,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, the last as a plain sum."""
    *geometry, mask = arguments
    on_grid = exact.operand(grad), exact.operand(x), exact.operand(weight)
    _charge_convolution(exact, on_grid[0], on_grid[2], weight.numel())
    _charge_convolution(exact, on_grid[0], on_grid[1], grad.numel() // max(1, grad.shape[1]))
    wanted = [mask[0], mask[1], False]  # type: ignore[index]
    dx, dw, _ = torch.ops.aten.convolution_backward(*on_grid, bias_sizes, *geometry, wanted)
    dims = [0, *range(2, grad.dim())]
    return dx, dw, exact.total(grad, dims) if mask[2] else None  # type: ignore[index]
