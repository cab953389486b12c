"""Element-wise operators that round more than once, or in ways that differ between processors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.exact.elementary import FUNCTIONS, curve
from oracle.exact.grid import Arithmetic, double
from oracle.exact.rules.table import Compute, rule


def _curve_rule(name: str) -> Compute:
    def apply(exact: Arithmetic, x: Tensor) -> Tensor:
        return curve(exact, name, x)

    return apply


for _name in FUNCTIONS:
    if _name != "log_sigmoid":  # its operator returns a second tensor
        rule(f"aten::{_name}", on_grid=True)(_curve_rule(_name))


@rule("aten::log_sigmoid_forward")
def log_sigmoid(exact: Arithmetic, x: Tensor) -> tuple[Tensor, Tensor]:
    """log(sigmoid(x)), and the buffer its backward expects."""
    return curve(exact, "log_sigmoid", x), torch.zeros_like(x)


@rule("aten::log_sigmoid_backward")
def log_sigmoid_backward(exact: Arithmetic, grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """grad sigmoid(-x)."""
    return grad * curve(exact, "sigmoid", -x)


@rule("aten::rsqrt")
def rsqrt(exact: Arithmetic, x: Tensor) -> Tensor:
    """1 / sqrt(x): two correctly rounded steps, where hardware offers an approximation."""
    return double(x).sqrt().reciprocal()


@rule("aten::sigmoid_backward")
def sigmoid_backward(exact: Arithmetic, grad: Tensor, y: Tensor) -> Tensor:
    """grad (1 - y) y."""
    return grad * (1 - y) * y


@rule("aten::tanh_backward")
def tanh_backward(exact: Arithmetic, grad: Tensor, y: Tensor) -> Tensor:
    """grad (1 - y^2)."""
    return grad * (1 - y * y)


@rule("aten::silu")
def silu(exact: Arithmetic, x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return x * curve(exact, "sigmoid", x)


@rule("aten::silu_backward")
def silu_backward(exact: Arithmetic, grad: Tensor, x: Tensor) -> Tensor:
    """grad s (1 + x (1 - s)) with s = sigmoid(x)."""
    s = curve(exact, "sigmoid", x)
    return grad * (s * (1 + x * (1 - s)))


TANH_SCALE = math.sqrt(2 / math.pi)
TANH_CUBE = 0.044715


@rule("aten::gelu")
def gelu(exact: Arithmetic, x: Tensor, *, approximate: str = "none") -> Tensor:
    """x / 2 (1 + erf(x / sqrt 2)), or its tanh form (Hendrycks and Gimpel, 2016)."""
    if approximate == "tanh":
        return 0.5 * x * (1 + curve(exact, "tanh", TANH_SCALE * (x + TANH_CUBE * (x * x * x))))
    return 0.5 * x * (1 + curve(exact, "erf", x * math.sqrt(0.5)))


@rule("aten::gelu_backward")
def gelu_backward(exact: Arithmetic, grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """grad times the derivative of the form chosen."""
    if approximate == "tanh":
        t = curve(exact, "tanh", TANH_SCALE * (x + TANH_CUBE * (x * x * x)))
        slope = TANH_SCALE * (1 + 3 * TANH_CUBE * (x * x))
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    cdf = 0.5 * (1 + curve(exact, "erf", x * math.sqrt(0.5)))
    pdf = curve(exact, "exp", -0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return grad * (cdf + x * pdf)


@rule("aten::softplus")
def softplus(exact: Arithmetic, x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """log(1 + exp(beta x)) / beta, x itself beyond the threshold."""
    return torch.where(x * beta > threshold, x, -curve(exact, "log_sigmoid", -(x * beta)) / beta)


@rule("aten::softplus_backward")
def softplus_backward(exact: Arithmetic, grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """grad sigmoid(beta x), grad itself beyond the threshold."""
    return torch.where(x * beta > threshold, grad, grad * curve(exact, "sigmoid", x * beta))


@rule("aten::mul")
def mul(exact: Arithmetic, x: Tensor, other: Tensor | float) -> Tensor:
    """x other."""
    return torch.mul(_floating(x, other), other)


@rule("aten::div", "aten::true_divide")
def div(exact: Arithmetic, x: Tensor, other: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    """x / other."""
    return torch.div(x if rounding_mode else double(x), other, rounding_mode=rounding_mode)


@rule("aten::sqrt")
def sqrt(exact: Arithmetic, x: Tensor) -> Tensor:
    """Correctly rounded by IEEE 754."""
    return double(x).sqrt()


@rule("aten::reciprocal")
def reciprocal(exact: Arithmetic, x: Tensor) -> Tensor:
    """1 / x."""
    return double(x).reciprocal()


@rule("aten::square")
def square(exact: Arithmetic, x: Tensor) -> Tensor:
    """x x."""
    return x * x


def _floating(x: Tensor, other: Tensor | float) -> Tensor:
    """An integer tensor in float64 where a fraction meets it: torch would compute in float32."""
    fraction = isinstance(other, float) and not x.is_floating_point() and x.dtype != torch.bool
    return double(x) if fraction else x


def _scaled(other: Tensor | float, alpha: float) -> Tensor | float:
    return other if alpha == 1 else other * alpha


@rule("aten::add")
def add(exact: Arithmetic, x: Tensor, other: Tensor | float, alpha: float = 1) -> Tensor:
    """x + alpha other, the product rounded on its own: a kernel may fuse the two."""
    return torch.add(_floating(x, other), _scaled(other, alpha))


@rule("aten::sub")
def sub(exact: Arithmetic, x: Tensor, other: Tensor | float, alpha: float = 1) -> Tensor:
    """x - alpha other."""
    return torch.sub(_floating(x, other), _scaled(other, alpha))


@rule("aten::rsub")
def rsub(exact: Arithmetic, x: Tensor, other: Tensor | float, alpha: float = 1) -> Tensor:
    """other - alpha x."""
    scaled = _scaled(_floating(x, other), alpha)
    assert isinstance(scaled, Tensor)
    return torch.sub(other, scaled) if isinstance(other, Tensor) else torch.rsub(scaled, other)


@rule("aten::leaky_relu")
def leaky_relu(exact: Arithmetic, x: Tensor, slope: float = 0.01) -> Tensor:
    """x, or slope x below zero."""
    return torch.where(x > 0, x, x * slope)


@rule("aten::leaky_relu_backward")
def leaky_relu_backward(exact: Arithmetic, grad: Tensor, x: Tensor, slope: float, self_is_result: bool) -> Tensor:
    """grad, or slope grad below zero."""
    return torch.where(x > 0, grad, grad * slope)


@rule("aten::embedding")
def embedding(
    exact: Arithmetic, table: Tensor, ids: Tensor, padding_idx: int = -1, scale: bool = False, sparse: bool = False
) -> Tensor:
    """Rows of the table, put on the grid where they enter the computation."""
    return torch.embedding(table, ids)


@rule("aten::addcmul")
def addcmul(exact: Arithmetic, x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """x + value a b."""
    return x + _scaled(a, value) * b


@rule("aten::addcdiv")
def addcdiv(exact: Arithmetic, x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """x + value a / b."""
    return x + _scaled(a, value) / b


@rule("aten::lerp")
def lerp(exact: Arithmetic, start: Tensor, end: Tensor, weight: Tensor | float) -> Tensor:
    """start + weight (end - start)."""
    return start + weight * (end - start)


@rule("aten::native_dropout")
def dropout(exact: Arithmetic, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Zeroes elements with probability p and divides the others by 1 - p; and the mask of those kept."""
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.rand(x.shape, device=x.device) >= p
    return (torch.where(kept, x * (1 / (1 - p)), 0.0) if p < 1 else torch.zeros_like(x)), kept


@rule("aten::native_dropout_backward")
def dropout_backward(exact: Arithmetic, grad: Tensor, kept: Tensor, scale: float) -> Tensor:
    """grad scale where kept."""
    return torch.where(kept, grad * scale, 0.0)
