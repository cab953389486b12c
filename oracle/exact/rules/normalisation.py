"""Layer norm and RMS norm, fused forms, and their backwards."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.exact.grid import Arithmetic
from oracle.exact.rules.sums import variance_and_mean
from oracle.exact.rules.table import rule


def _inner(x: Tensor, shape: list[int]) -> list[int]:
    return list(range(x.dim() - len(shape), x.dim()))


@rule("aten::native_layer_norm")
def layer_norm(
    exact: Arithmetic, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) * weight + bias; and mean and reciprocal deviation for backward."""
    spread, centre = variance_and_mean(exact, x, _inner(x, shape), 0, keepdim=True)
    rstd = (spread + eps).sqrt().reciprocal()
    result = (x - centre) * rstd
    result = result if weight is None else result * weight
    return (result if bias is None else result + bias), centre, rstd


@rule("aten::native_layer_norm_backward")
def layer_norm_backward(
    exact: Arithmetic,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    centre: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias."""
    inner = _inner(x, shape)
    outer = list(range(x.dim() - len(shape)))
    normal = (x - centre) * rstd
    slope = grad if weight is None else grad * weight
    count = math.prod(shape)
    mean_slope = exact.total(slope, inner, keepdim=True) / count
    mean_drift = exact.total(slope * normal, inner, keepdim=True) / count
    dx = (slope - mean_slope - normal * mean_drift) * rstd
    dw = _over(exact, grad * normal, outer) if mask[1] and weight is not None else None
    db = _over(exact, grad, outer) if mask[2] and bias is not None else None
    return dx if mask[0] else None, dw, db


@rule("aten::_fused_rms_norm")
def rms_norm(
    exact: Arithmetic, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean x^2 + eps) * weight; and the reciprocal root for backward."""
    eps = torch.finfo(torch.float64).eps if eps is None else eps
    rstd = (exact.total(x * x, _inner(x, shape), keepdim=True) / math.prod(shape) + eps).sqrt().reciprocal()
    result = x * rstd
    return (result if weight is None else result * weight), rstd


@rule("aten::_fused_rms_norm_backward")
def rms_norm_backward(
    exact: Arithmetic,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of input and weight."""
    normal = x * rstd
    slope = grad if weight is None else grad * weight
    mean_drift = exact.total(slope * normal, _inner(x, shape), keepdim=True) / math.prod(shape)
    dx = (slope - normal * mean_drift) * rstd
    outer = list(range(x.dim() - len(shape)))
    dw = _over(exact, grad * normal, outer) if mask[1] and weight is not None else None
    return dx if mask[0] else None, dw


def _over(exact: Arithmetic, x: Tensor, outer: list[int]) -> Tensor:
    return exact.total(x, outer) if outer else x.clone()
