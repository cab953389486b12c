"""Transcendental functions, correctly rounded to the grid.

Vector and scalar code, two processors, a processor and a GPU differ in the last place of exp or sin.
The hardware's value is within 2^-44 of the truth, so rounding it to a grid of 2^-24 gives the truth's
own nearest grid point, unless it lies that close to the middle between two. Those few (one in half a
million) are computed again with arbitrary precision (mpmath). What comes out is therefore not merely
reproducible but defined: f(x) to the nearest multiple of 2^-24, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import torch
from torch import Tensor

from oracle.exact.grid import Arithmetic, double

# Hardware results are taken to be within 2^-44 absolutely, or 2^-50 relatively where that is more.
ABSOLUTE_BITS = 44
RELATIVE_BITS = 50

Precise = Callable[..., mpmath.mpf]


def _logistic(x: mpmath.mpf) -> mpmath.mpf:
    return 1 / (1 + mpmath.exp(-x))


def _log_logistic(x: mpmath.mpf) -> mpmath.mpf:
    return -mpmath.log(1 + mpmath.exp(-x))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Precise]] = {
    "exp": (torch.exp, mpmath.exp),
    "exp2": (torch.exp2, lambda x: mpmath.mpf(2) ** x),
    "expm1": (torch.expm1, mpmath.expm1),
    "log": (torch.log, mpmath.log),
    "log2": (torch.log2, lambda x: mpmath.log(x, 2)),
    "log10": (torch.log10, mpmath.log10),
    "log1p": (torch.log1p, lambda x: mpmath.log(1 + x)),
    "sin": (torch.sin, mpmath.sin),
    "cos": (torch.cos, mpmath.cos),
    "tan": (torch.tan, mpmath.tan),
    "tanh": (torch.tanh, mpmath.tanh),
    "atan": (torch.atan, mpmath.atan),
    "sigmoid": (torch.sigmoid, _logistic),
    "log_sigmoid": (torch.nn.functional.logsigmoid, _log_logistic),
    "erf": (torch.erf, mpmath.erf),
    "erfc": (torch.erfc, mpmath.erfc),
}


def curve(exact: Arithmetic, name: str, x: Tensor) -> Tensor:
    """The function ``name`` of x, correctly rounded to multiples of 2^-curve, float64."""
    fast, precise = FUNCTIONS[name]
    x = double(x)
    return settle(fast(x), exact.grid.curve, precise, x)


def power(exact: Arithmetic, base: Tensor, exponent: Tensor) -> Tensor:
    """base ** exponent, correctly rounded to multiples of 2^-curve, float64."""
    base, exponent = torch.broadcast_tensors(double(base), double(exponent))
    return settle(torch.pow(base, exponent), exact.grid.curve, mpmath.power, base, exponent)


def settle(approximate: Tensor, bits: int, precise: Precise, *arguments: Tensor) -> Tensor:
    """The multiples of 2^-bits nearest to the true values, given values that are nearly true.

    Args:
        approximate: float64, within 2^-44 or a relative 2^-50 of the truth.
        precise: the function on mpmath numbers, called where ``approximate`` does not decide.
        arguments: its arguments, of the same shape as ``approximate``.
    """
    scaled = approximate * 2.0**bits
    nearest = scaled.round()
    margin = scaled.abs().mul_(2.0**-RELATIVE_BITS).clamp_(min=2.0 ** (bits - ABSOLUTE_BITS))
    distance = scaled.sub_(nearest).abs_().add_(margin)
    if distance.numel() and not distance.max().item() <= 0.5:
        doubtful = distance > 0.5  # NaN (from NaN and infinities) is not doubtful
        columns = [a[doubtful].tolist() for a in arguments]
        settled = [_nearest_multiple(precise, bits, point) for point in zip(*columns, strict=True)]
        nearest[doubtful] = torch.tensor(settled, dtype=torch.float64, device=nearest.device)
    return nearest.mul_(2.0**-bits)


def _nearest_multiple(precise: Precise, bits: int, point: tuple[float, ...]) -> float:
    with mpmath.workprec(200):
        return float(mpmath.nint(precise(*map(mpmath.mpf, point)) * mpmath.mpf(2) ** bits))
