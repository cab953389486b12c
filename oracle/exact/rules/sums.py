"""Plain sums and what is made of them: means, variances, norms, accumulating scatters, losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.exact.elementary import power
from oracle.exact.grid import Arithmetic, ExactError
from oracle.exact.rules.table import rule


def _is_integer(x: Tensor) -> bool:
    return not x.is_floating_point()


def _dims(x: Tensor, dims: int | list[int] | None) -> list[int]:
    if dims is None or dims == []:
        return list(range(x.dim()))
    chosen = [dims] if isinstance(dims, int) else dims
    return [d % max(1, x.dim()) for d in chosen] if x.dim() else []


@rule("aten::sum", on_grid=True)
def total(
    exact: Arithmetic,
    x: Tensor,
    dims: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over ``dims``; integers and booleans are counted as torch counts them."""
    if _is_integer(x) and not (dtype and dtype.is_floating_point):
        return torch.sum(x, _dims(x, dims), keepdim=keepdim, dtype=dtype)
    return exact.total(x, _dims(x, dims), keepdim)


@rule("aten::mean")
def mean(
    exact: Arithmetic,
    x: Tensor,
    dims: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum, divided once by the count."""
    over = _dims(x, dims)
    return exact.total(x, over, keepdim) / math.prod(x.shape[d] for d in over)


@rule("aten::cumsum", on_grid=True)
def running_sum(exact: Arithmetic, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Prefix sums; each is one of the partial sums that the budget covers."""
    if _is_integer(x):
        return torch.cumsum(x, dim, dtype=dtype)
    x = exact.addend(x)
    exact.charge_sum(x, [dim])
    return x.cumsum(dim)


def variance_and_mean(
    exact: Arithmetic, x: Tensor, dims: list[int], correction: float, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Sum of squared deviations from the mean over (count - correction), and the mean."""
    count = math.prod(x.shape[d] for d in dims)
    centre = exact.total(x, dims, keepdim=True) / count
    deviation = x - centre
    spread = exact.total(deviation * deviation, dims, keepdim) / (count - correction)
    return spread, centre if keepdim else centre.reshape(spread.shape)


@rule("aten::var_mean.correction")
def var_mean(
    exact: Arithmetic, x: Tensor, dims: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    return variance_and_mean(exact, x, _dims(x, dims), 1 if correction is None else correction, keepdim)


@rule("aten::var.correction")
def var(
    exact: Arithmetic, x: Tensor, dims: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> Tensor:
    """Variance."""
    return var_mean(exact, x, dims, correction=correction, keepdim=keepdim)[0]


@rule("aten::std.correction")
def std(
    exact: Arithmetic, x: Tensor, dims: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> Tensor:
    """Square root of the variance (IEEE: correctly rounded)."""
    return var(exact, x, dims, correction=correction, keepdim=keepdim).sqrt()


@rule("aten::linalg_vector_norm", on_grid=True)
def vector_norm(
    exact: Arithmetic,
    x: Tensor,
    order: float = 2,
    dims: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Norms of order 1, 2 and infinity."""
    if order == 2:
        return exact.level(exact.total(x * x, _dims(x, dims), keepdim).sqrt())
    if order == 1:
        return exact.total(x.abs(), _dims(x, dims), keepdim)
    if math.isinf(order):
        return torch.linalg.vector_norm(x, order, _dims(x, dims), keepdim)
    raise ExactError(f"{exact.operator}: a norm of order {order} has no exact rule (1, 2 and inf have)")


@rule("aten::norm", on_grid=True)
def norm(
    exact: Arithmetic, x: Tensor, order: float | None = 2, dims: list[int] | None = None, keepdim: bool = False
) -> Tensor:
    """The older name of the vector norm."""
    return vector_norm(exact, x, 2 if order is None else order, dims, keepdim)


@rule("aten::index_add", on_grid=True)
def index_add(exact: Arithmetic, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """x with the rows of ``source`` added at ``index``, repeats and all."""
    if _is_integer(x):
        return torch.index_add(x, dim, index, source, alpha=alpha)
    start = exact.addend(x)
    return exact.scatter(start, source if alpha == 1 else source * alpha, lambda t, s: t.index_add(dim, index, s))


@rule("aten::scatter_add", on_grid=True)
def scatter_add(exact: Arithmetic, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """x with the elements of ``source`` added at ``index``, repeats and all."""
    if _is_integer(x):
        return torch.scatter_add(x, dim, index, source)
    start = exact.addend(x)
    return exact.scatter(start, source, lambda t, s: t.scatter_add(dim, index, s))


@rule("aten::scatter_reduce", on_grid=True)
def scatter_reduce(
    exact: Arithmetic, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Sums are exact; greatest and smallest are the same in any order."""
    if reduce in ("amax", "amin"):
        return torch.scatter_reduce(x, dim, index, source, reduce, include_self=include_self)
    if reduce == "sum":
        start = x if include_self else torch.scatter(x, dim, index, torch.zeros_like(source))
        return scatter_add(exact, start, dim, index, source)
    raise ExactError(f"{exact.operator} with reduce={reduce!r} has no exact rule (sum, amax and amin have)")


@rule("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put", on_grid=True)
def index_put(
    exact: Arithmetic,
    x: Tensor,
    indices: list[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """Assignment; with ``accumulate`` (the gradient of indexing) an exact sum."""
    if not accumulate or _is_integer(x):
        return torch.ops.aten.index_put(x, indices, values, accumulate)
    start = exact.addend(x)
    return exact.scatter(start, values, lambda t, v: torch.ops.aten.index_put(t, indices, v, True))


@rule("aten::embedding_dense_backward", on_grid=True)
def embedding_backward(
    exact: Arithmetic, grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Gradient of an embedding table: the gradients of each id's occurrences, summed."""
    if scale_grad_by_freq:
        raise ExactError(f"{exact.operator}: scale_grad_by_freq makes one sequence's gradient depend on the others")
    table = grad.new_zeros(rows, grad.shape[-1], dtype=torch.float64)

    def add(start: Tensor, g: Tensor) -> Tensor:
        return start + torch.ops.aten.embedding_dense_backward(g, indices, rows, padding_idx, False)

    return exact.scatter(table, grad, add)


@rule("aten::nll_loss_forward")
def nll_loss(
    exact: Arithmetic, log_p: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of [n, c] or [c]; reduction 0 none, 1 mean, 2 sum; and its total weight."""
    kept = target != ignore_index
    safe = torch.where(kept, target, 0)
    weights = torch.ones_like(safe, dtype=torch.float64) if weight is None else weight.to(torch.float64)[safe]
    weights = torch.where(kept, weights, 0.0)
    losses = -log_p.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    losses = torch.where(kept, losses if weight is None else losses * weights, 0.0)
    whole = exact.total(weights)
    if reduction == 0:
        return losses, torch.zeros_like(whole)
    return (exact.total(losses) / whole if reduction == 1 else exact.total(losses)), whole


@rule("aten::nll_loss_backward")
def nll_loss_backward(
    exact: Arithmetic,
    grad: Tensor,
    log_p: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Minus the (weighted) gradient at each target, zero elsewhere."""
    kept = target != ignore_index
    safe = torch.where(kept, target, 0)
    each = -(grad / total_weight if reduction == 1 else grad)
    each = each.expand(target.shape) if weight is None else each * weight.to(torch.float64)[safe]
    each = torch.where(kept, each, 0.0)
    return torch.zeros_like(log_p).scatter(-1, safe.unsqueeze(-1), each.unsqueeze(-1))


@rule("aten::mse_loss")
def mse_loss(exact: Arithmetic, x: Tensor, y: Tensor, reduction: int = 1) -> Tensor:
    """Squared differences; reduction 0 none, 1 mean, 2 sum."""
    squares = (x - y) * (x - y)
    return squares if reduction == 0 else mean(exact, squares) if reduction == 1 else exact.total(squares)


@rule("aten::mse_loss_backward")
def mse_loss_backward(exact: Arithmetic, grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    """2 (x - y) times the gradient, over the count for a mean."""
    slope = (x - y) * 2 * grad
    return slope / x.numel() if reduction == 1 else slope


@rule("aten::pow.Tensor_Scalar")
def pow_scalar(exact: Arithmetic, x: Tensor, exponent: float) -> Tensor:
    """Small exponents by multiplication, division and square root; others correctly rounded."""
    match exponent:
        case 0:
            return torch.ones_like(x)
        case 1:
            return x.clone()
        case 2:
            return x * x
        case 3:
            return x * x * x
        case -1:
            return x.reciprocal()
        case 0.5:
            return x.sqrt()
        case -0.5:
            return x.sqrt().reciprocal()
    if _is_integer(x) and isinstance(exponent, int):
        return x.pow(exponent)
    return power(exact, x, torch.tensor(float(exponent), dtype=torch.float64, device=x.device))


@rule("aten::pow.Tensor_Tensor")
def pow_tensor(exact: Arithmetic, x: Tensor, exponent: Tensor) -> Tensor:
    """Element by element, correctly rounded to the grid."""
    if _is_integer(x) and _is_integer(exponent):
        return x.pow(exponent)
    return power(exact, x, exponent)


@rule("aten::pow.Scalar")
def pow_base(exact: Arithmetic, base: float, exponent: Tensor) -> Tensor:
    """One base, many exponents (rotary frequencies)."""
    return power(exact, torch.tensor(float(base), dtype=torch.float64, device=exponent.device), exponent)
