"""The grid: where numbers may lie so that float64 sums are exact, and the budget that proves it.

A float64 holds 53 significant bits. If every addend is a multiple of 2^-s and the sum of the
magnitudes stays below 2^(53-s), each partial sum, in whatever order, is itself a multiple of 2^-s
below 2^(53-s): it is represented exactly, nothing is ever rounded, and order cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MANTISSA_BITS = 53


class ExactError(RuntimeError):
    """Something happened inside ``oracle.exact()`` that exact arithmetic cannot vouch for."""


class BudgetError(ExactError):
    """A reduction could need more than 53 bits; names the operator, its shapes and the bits."""


class UnknownOperatorError(ExactError):
    """An operator that may reduce or round has no rule, so its result cannot be vouched for."""


class PrecisionError(ExactError):
    """A float32, float16 or bfloat16 tensor stands where float64 is needed."""


@dataclass(frozen=True)
class Grid:
    """Fractional bits of each kind of number.

    operand: multiplicands of products that are summed (matmul, convolution): multiples of 2^-operand.
    addend: everything else that is summed: multiples of 2^-addend. Twice ``operand``, so that the
        products of two operands are addends already.
    curve: values of transcendental functions (exp, log, sin, erf, ...), correctly rounded to 2^-curve.
    loss_scale: the backward pass runs on the loss times 2^loss_scale and leaf gradients are divided
        again, both exactly, so that small gradients meet the same grid as large activations.
    """

    operand: int = 18
    curve: int = 24
    loss_scale: int = 4

    @property
    def addend(self) -> int:
        """Fractional bits of what is summed."""
        return 2 * self.operand


@dataclass
class Usage:
    """What one operator asked of the 53 bits so far."""

    reductions: int = 0
    bits: float = 0.0


@dataclass
class Arithmetic:
    """Snapping and accounting that the rules use: one per entered mode.

    Attributes:
        grid: the fractional bits.
        usage: operator -> how many reductions and the most bits one of them could need.
        operator: the operator being computed, for messages.
    """

    grid: Grid
    usage: dict[object, Usage] = field(default_factory=dict)
    operator: object = "?"

    def operand(self, x: Tensor) -> Tensor:
        """x rounded to the nearest multiple of 2^-operand, float64."""
        return level(x, self.grid.operand)

    def addend(self, x: Tensor) -> Tensor:
        """x rounded to the nearest multiple of 2^-addend, float64."""
        return snap(x, self.grid.addend)

    def level(self, x: Tensor) -> Tensor:
        """Like ``addend``, but leaves infinities and a mask's -1.8e308 as they are (see ``level``)."""
        return level(x, self.grid.addend)

    def level_(self, x: Tensor) -> Tensor:
        """``level`` in place, for a float64 result that nobody else holds."""
        shift = 1.5 * 2.0 ** (MANTISSA_BITS - 1 - self.grid.addend)
        return x.add_(shift).sub_(shift)

    def charge(self, bound: float, fractional_bits: int, operands: Sequence[Tensor]) -> None:
        """Book one reduction whose sum of magnitudes is at most ``bound``; BudgetError beyond 53 bits."""
        bits = math.log2(bound) + fractional_bits if bound > 0 else 0.0
        usage = self.usage.get(self.operator) or self.usage.setdefault(self.operator, Usage())
        usage.reductions += 1
        usage.bits = max(usage.bits, bits)
        if bits > MANTISSA_BITS:
            shapes = " x ".join(str(tuple(t.shape)) for t in operands)
            raise BudgetError(
                f"{self.operator} on {shapes}: a sum of magnitudes up to {bound:.4g} on a grid of "
                f"2^-{fractional_bits} needs {bits:.1f} bits, and float64 has {MANTISSA_BITS}. "
                f"Choose a coarser grid, exact(operand={self.grid.operand - 2}), or a smaller loss_scale."
            )

    def fits(self, bound: float, fractional_bits: int) -> bool:
        """Whether a sum of magnitudes up to ``bound`` stays within 53 bits."""
        return bound * 2.0**fractional_bits <= 2.0**MANTISSA_BITS

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Exact ``a @ b`` of [..., m, k] by [..., k, n], both snapped to the operand grid."""
        apply = torch.mm if a.dim() == b.dim() == 2 else torch.matmul
        return self.bilinear(apply, a, b, a.shape[-1])

    def bilinear(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, terms: int) -> Tensor:
        """``apply(a, b)``, whose every element sums ``terms`` products of an element of a and one of b."""
        a, b = self.operand(a), self.operand(b)
        bound = terms * largest(a) * largest(b)
        if not self.fits(bound, self.grid.addend):  # the cheap bound is too coarse: the true one
            bound = largest(apply(finite(a).abs(), finite(b).abs()))
        self.charge(bound, self.grid.addend, (a, b))
        return apply(a, b)

    def total(self, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        """Exact sum of x, snapped to the addend grid, over ``dims`` (None or empty: all)."""
        x = self.addend(x)
        over = list(dims) if dims else list(range(x.dim()))
        self.charge_sum(x, over)
        return x.sum(over, keepdim=keepdim)

    def charge_sum(self, x: Tensor, dims: Sequence[int]) -> None:
        """Book the sum of the addends x over ``dims``."""
        bound = math.prod(x.shape[d] for d in dims) * largest(x)
        if not self.fits(bound, self.grid.addend):
            bound = largest(finite(x).abs().sum(list(dims)))
        self.charge(bound, self.grid.addend, (x,))

    def scatter(self, start: Tensor, x: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``add(start, x)``: the elements of x, on the addend grid, added to ``start`` where they land."""
        x = self.addend(x)
        bound = largest(start) + x.numel() * largest(x)
        if not self.fits(bound, self.grid.addend):
            bound = largest(add(finite(start).abs(), finite(x).abs()))
        self.charge(bound, self.grid.addend, (x,))
        return add(start, x)


def snap(x: Tensor, fractional_bits: int) -> Tensor:
    """x in float64, rounded (half to even) to multiples of 2^-fractional_bits; NaN and inf stay.

    Three operations, each exact or correctly rounded everywhere. Idempotent below 2^(53-bits).
    """
    return double(x).mul(2.0**fractional_bits).round_().mul_(2.0**-fractional_bits)


def level(x: Tensor, fractional_bits: int) -> Tensor:
    """``snap`` for numbers that may be as large as -1.8e308: adding 1.5 * 2^(52-bits) rounds to the grid.

    It does so for magnitudes below 2^(51-bits); beyond, the step is another power of two, the same for the
    same number, and huge numbers are unchanged. Sums snap again, by ``snap``.
    """
    shift = 1.5 * 2.0 ** (MANTISSA_BITS - 1 - fractional_bits)
    return double(x).add(shift).sub_(shift)


def double(x: Tensor) -> Tensor:
    """x in float64."""
    return x if x.dtype == torch.float64 else x.to(torch.float64)


def largest(x: Tensor) -> float:
    """Largest finite magnitude in x, 0.0 if empty: one pass unless something is not finite."""
    if x.numel() == 0:
        return 0.0
    if x.dim() > 1 and not x.is_contiguous():
        x = x.mT  # a transposed matrix is three times slower to search
    least, most = torch.aminmax(x)
    bound = max(-least.item(), most.item())
    return bound if math.isfinite(bound) else finite(x).abs().max().item()


def finite(x: Tensor) -> Tensor:
    """x with NaN and infinities as 0: they spread by IEEE rules, exactly, and need no bits."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
