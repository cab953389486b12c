"""Softmax, its logarithm and its backward, with an exact sum inside.

The input is first levelled to the addend grid, so that x - max is exact and every way to write the
loss (log_softmax and pick, logsumexp minus the target) has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.exact.elementary import curve
from oracle.exact.grid import Arithmetic
from oracle.exact.rules.table import rule


def shifted(exact: Arithmetic, x: Tensor, dim: int) -> Tensor:
    """x minus its maximum along ``dim``, on the addend grid; -inf stays -inf."""
    x = exact.level(x)
    return x - x.amax(dim, keepdim=True) if x.numel() else x


def exponentials(exact: Arithmetic, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """exp(x - max) and its exact sum along ``dim``: each term is at most 1, so the bound is static."""
    terms = curve(exact, "exp", x)
    exact.charge(x.shape[dim] if x.dim() else 1, exact.grid.curve, (x,))
    return terms, terms.sum(dim, keepdim=True)


@rule("aten::_softmax")
def softmax(exact: Arithmetic, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """exp(x - max) over its sum."""
    terms, whole = exponentials(exact, shifted(exact, x, dim), dim)
    return terms.div_(whole)


@rule("aten::_safe_softmax")
def safe_softmax(exact: Arithmetic, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax that is zero where everything is masked (-inf), as scaled_dot_product_attention has it."""
    masked = (x == -torch.inf).all(dim, keepdim=True)
    return softmax(exact, x, dim).masked_fill_(masked, 0.0)


@rule("aten::_softmax_backward_data")
def softmax_backward(
    exact: Arithmetic, grad: Tensor, p: Tensor, dim: int, input_dtype: torch.dtype | None = None
) -> Tensor:
    """p (grad - sum p grad)."""
    return p * (grad - exact.total(p * grad, [dim] if p.dim() else None, keepdim=True))


@rule("aten::_log_softmax")
def log_softmax(exact: Arithmetic, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """x - max - log(sum exp(x - max))."""
    x = shifted(exact, x, dim)
    return x - curve(exact, "log", exponentials(exact, x, dim)[1])


@rule("aten::_log_softmax_backward_data")
def log_softmax_backward(
    exact: Arithmetic, grad: Tensor, log_p: Tensor, dim: int, input_dtype: torch.dtype | None = None
) -> Tensor:
    """grad - p sum grad."""
    return grad - curve(exact, "exp", log_p) * exact.total(grad, [dim] if grad.dim() else None, keepdim=True)


@rule("aten::logsumexp", on_grid=True)
def logsumexp(exact: Arithmetic, x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """max + log(sum exp(x - max)); minus infinity for a row of them."""
    x = exact.level(x)
    if not x.numel():
        return x.logsumexp(dims, keepdim)
    most = x.amax(dims, keepdim=True)
    most = torch.where(most.isinf(), 0.0, most)
    terms = curve(exact, "exp", x - most)
    over = [d % x.dim() for d in dims] if x.dim() else None
    result = most + curve(exact, "log", exact.total(terms, over, keepdim=True))
    return result if keepdim else result.squeeze(dims)
