"""Sums of products: matrix products, convolutions, grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.exact.grid import Arithmetic, UnknownOperatorError
from oracle.exact.rules.table import rule


@rule("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot", on_grid=True)
def product(exact: Arithmetic, a: Tensor, b: Tensor) -> Tensor:
    """a @ b."""
    return exact.product(a, b)


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


@rule("aten::convolution", "aten::_convolution")
def convolution(exact: Arithmetic, x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """Convolution of x [n, c, ...] with weight; torch's own float64 kernels, which add plain products."""
    geometry = arguments[:6]

    def apply(a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.aten.convolution(a, b, None, *geometry)

    result = exact.bilinear(apply, x, weight, weight.numel())
    return result if bias is None else result + bias.view(-1, *[1] * (x.dim() - 2))


@rule("aten::convolution_backward")
def convolution_backward(
    exact: Arithmetic, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, the last as a plain sum."""
    *geometry, wanted = arguments

    def to_input(g: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.convolution_backward(g, x, w, None, *geometry, [True, False, False])[0]

    def to_weight(g: Tensor, a: Tensor) -> Tensor:
        return torch.ops.aten.convolution_backward(g, a, weight, None, *geometry, [False, True, False])[1]

    dx = exact.bilinear(to_input, grad, weight, weight.numel()) if wanted[0] else None
    dw = exact.bilinear(to_weight, grad, x, grad.numel()) if wanted[1] else None
    db = exact.total(grad, [0, *range(2, grad.dim())]) if wanted[2] else None
    return dx, dw, db


@rule("aten::linalg_solve_triangular")
def triangular_solution(
    exact: Arithmetic, a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """The x of a x = b, or x a = b, by (1 + n)^-1 = (1 - n) (1 + n^2) (1 + n^4) ..., n being a beside its diagonal.

    An entry depends on the rows between it and its own alone, never on where they stand: a sequence's rows may
    be shifted by pads. Only ones on the diagonal: anything else would divide.
    """
    if not unitriangular:
        raise UnknownOperatorError("linalg_solve_triangular has an exact rule with unitriangular=True only")
    power = -(a.triu(1) if upper else a.tril(-1))
    result = b
    for _ in range(max(1, a.shape[-1] - 1).bit_length()):
        result = result + (exact.product(power, result) if left else exact.product(result, power))
        power = exact.product(power, power)
    return result
