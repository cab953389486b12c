"""``with exact():`` any PyTorch code inside computes sums that do not depend on their order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from oracle.exact.grid import Arithmetic, ExactError, Grid, PrecisionError, UnknownOperatorError, Usage, double
from oracle.exact.rules import PASSES, RULES
from oracle.exact.rules.attention import scaled_dot_product_attention
from oracle.exact.rules.table import Rule

# Namespaces of operators that move numbers between ranks, or add a few of them up.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})

LOW_PRECISION = frozenset({torch.float32, torch.float16, torch.bfloat16})

Handler = Callable[..., Any]


class _State(threading.local):
    """inside_rule: what a rule calls is computed as it stands. inside_function: within a backward node the
    function mode is at work, and taken off for as long. inside_hooks: a leaf's own hooks run, unscaled gradients
    in hand."""

    inside_rule = False
    inside_function = False
    inside_hooks = False


_state = _State()


class exact:
    """A context in which float64 sums are exact, forward and backward, on unmodified code.

    Operands of sums of products are rounded to multiples of 2^-operand, addends to 2^-(2 operand),
    transcendental functions correctly rounded to 2^-curve; down-casts stay in float64; fused kernels are
    computed by definition. Two computations that are the same mathematics, padded or packed, in any
    order, then agree in every bit. ``loss.backward()`` runs on the loss times 2^loss_scale and hands
    each leaf its gradient divided by it again. Nests, may be entered again, and restores everything.

    Args:
        operand, curve, loss_scale: fractional bits, see ``Grid``.

    Raises (inside the block):
        BudgetError: a reduction could need more than 53 bits.
        UnknownOperatorError: an operator without a rule that may reduce or round.
        PrecisionError: a parameter in float32 or lower, or a write into such a tensor.

    Example:
        >>> with exact():
        ...     padded, packed = model(rows), model(stream)
    """

    def __init__(self, operand: int = Grid.operand, curve: int = Grid.curve, loss_scale: int = Grid.loss_scale):
        self.grid = Grid(operand, curve, loss_scale)
        self._usage: dict[object, Usage] = {}
        self._entered = threading.local()

    def __enter__(self) -> exact:
        functions = _Functions(self.grid)
        modes = (functions, _Operators(Arithmetic(self.grid, self._usage), functions))
        for mode in modes:
            mode.__enter__()
        self._stack().append(modes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._stack().pop()):
            mode.__exit__(kind, error, trace)

    def _stack(self) -> list[tuple[_Functions, _Operators]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack

    @property
    def usage(self) -> dict[str, Usage]:
        """Operator name -> its reductions so far and the most bits that one could have needed."""
        return {str(operator): usage for operator, usage in self._usage.items()}

    @property
    def bits(self) -> float:
        """The most bits that any reduction so far could have needed; at most 53, or it had raised."""
        return max((u.bits for u in self._usage.values()), default=0.0)

    @property
    def reductions(self) -> int:
        """How many reductions were computed so far."""
        return sum(u.reductions for u in self._usage.values())


class plain(TorchDispatchMode):
    """A context in which a model in float64 computes in float64, its norms, rotary tables and softmax too.

    Without it they run in float32. Nothing is put on a grid: sums round, by 1e-15 or so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arithmetic = _Unsnapped(Grid())

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._arithmetic.operator = func
        if func.is_view or func.namespace in COLLECTIVES:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_grouped_mm":  # torch has none for float64
            return RULES[name].compute(self._arithmetic, *args, **(kwargs or {}))
        cast = name in {"aten::_to_copy", "aten::to"}
        return (_to_copy if cast else _pass)(self._arithmetic, func, args, kwargs or {})


class _Unsnapped(Arithmetic):
    """Products that round."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a, b)


class _Operators(TorchDispatchMode):
    """Sees every operator below autograd, forward and backward, and computes it by its rule."""

    def __init__(self, arithmetic: Arithmetic, functions: _Functions):
        super().__init__()
        self.arithmetic = arithmetic
        self.functions = functions

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it would add costs more than most operators here

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dropped = not _state.inside_function and torch._C._len_torch_function_stack() == 0
        if dropped and torch._C._current_graph_task_id() != -1:
            # Autograd drops function modes: what a checkpoint computes again must meet ours. It restores its
            # own state after each node, so nothing needs to be taken away.
            torch._C._push_on_torch_function_stack(self.functions)
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _HANDLERS[func] = _handler(func)
        if handler is _pass_view or _state.inside_rule:
            return func(*args, **kwargs)
        _state.inside_rule = True
        outer, self.arithmetic.operator = self.arithmetic.operator, func
        try:
            with torch._C.DisableTorchFunction():  # a rule's own calls need not pass the function mode
                return handler(self.arithmetic, func, args, kwargs)
        finally:
            _state.inside_rule = False
            self.arithmetic.operator = outer


class _Functions(TorchFunctionMode):
    """Sees what must be caught above autograd: the choice of an attention kernel, and ``backward``."""

    def __init__(self, grid: Grid):
        super().__init__()
        self.factor = 2.0**grid.loss_scale
        self.retained: WeakSet[Tensor] = WeakSet()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outer, _state.inside_function = _state.inside_function, torch._C._current_graph_task_id() != -1
        try:
            return self._call(func, args, kwargs or {})
        finally:
            _state.inside_function = outer

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _COMPOSED:
            return _COMPOSED[func](*args, **kwargs)
        if func in _PRODUCTS and not kwargs and args[0].dim() + args[1].dim() < 4 and min(args[0].dim(), args[1].dim()):
            return _product(*_PRODUCTS[func](*args))
        # Inside a backward pass gradients are scaled already, except where a leaf's hooks begin another one.
        nested = torch._C._current_graph_task_id() != -1 and not _state.inside_hooks
        if func is torch.Tensor.backward and not nested:
            with _unscaling(self.retained, self.factor):
                return _scaled_backward(self.factor, *args, **kwargs)
        if func is torch.autograd.grad and not nested:
            return _scaled_grad(self.factor, *args, **kwargs)
        if func is torch.Tensor.retain_grad and not args[0].is_leaf:
            self.retained.add(args[0])
        return func(*args, **kwargs)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with vectors as matrices of one row or column: torch's gradient of a product with a vector
    multiplies element by element, which rounds otherwise than the gradient of a matrix product.

    Two vectors of which one is constant are left as they are: a gradient cache's second pass is such a product with
    the gradients of the first, which are to come out of it as they went in."""
    if a.dim() == b.dim() == 1 and a.requires_grad != b.requires_grad:
        return torch.dot(a, b)
    rows = a.unsqueeze(0) if a.dim() == 1 else a
    columns = b.unsqueeze(1) if b.dim() == 1 else b
    result = torch.matmul(rows, columns)
    result = result.squeeze(-1) if b.dim() == 1 else result
    return result.squeeze(-1 if b.dim() == 1 else -2) if a.dim() == 1 else result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() > 1:
        return torch.nn.functional.linear(input, weight, bias)
    return torch.nn.functional.linear(input.unsqueeze(0), weight, bias).squeeze(0)


# Functions of torch's public interface that are composed of other operators, above autograd.
_COMPOSED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: scaled_dot_product_attention,
    torch.nn.functional.linear: _linear,
}


def _as_given(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def _as_outer(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.unsqueeze(1), b.unsqueeze(0)


# Products with a vector, which are computed as products of matrices.
_PRODUCTS: dict[Any, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _as_given),
    **dict.fromkeys((torch.mv, torch.Tensor.mv, torch.dot, torch.Tensor.dot), _as_given),
    torch.Tensor.__rmatmul__: lambda b, a: (a, b),
    **dict.fromkeys((torch.outer, torch.Tensor.outer, torch.ger, torch.Tensor.ger), _as_outer),
}


# --- operators --------------------------------------------------------------------------------------


def _handler(func: Any) -> Handler:
    """How to compute an operator; chosen once for each."""
    if not isinstance(func, OpOverload):
        return _refuse  # a higher-order operator: a whole program that cannot be seen into
    name, overload = func._schema.name, func._overloadname
    rule = RULES.get(f"{name}.{overload}") or RULES.get(name)
    if rule is not None:
        return _out_of_place(rule) if any(a.is_out for a in func._schema.arguments) else _ruled(rule)
    if name in {"aten::_to_copy", "aten::to"}:
        return _to_copy
    if name.removesuffix("_") == "aten::scatter" and "reduce" in overload:
        return _refuse_floats
    base = name.removesuffix("_")
    if base != name:  # in place
        rule = RULES.get(f"{base}.{overload}") or RULES.get(base)
        if rule is not None:
            return _in_place(rule)
        if base in PASSES or name == "aten::copy_":
            return _pass_in_place
    # Collectives move numbers; an all-reduce adds a few that lie on the grid, exactly.
    if func.is_view or torch.Tag.inplace_view in func.tags or func.namespace in COLLECTIVES | {"prim"}:
        return _pass_view
    return _pass if name in PASSES else _refuse_floats


def _ruled(rule: Rule) -> Handler:
    def handle(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = rule.compute(exact, *_promoted(exact, args), **kwargs)
        if rule.on_grid:
            return result
        return tuple(_levelled(exact, r) for r in result) if isinstance(result, tuple) else _levelled(exact, result)

    return handle


def _levelled(exact: Arithmetic, result: Any) -> Any:
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    return exact.level_(result) if result.dtype is torch.float64 else exact.level(result)


def _in_place(rule: Rule) -> Handler:
    compute = _ruled(rule)

    def handle(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::add_" and torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)  # a leaf's gradient grows; it lies on a finer grid by the loss scale
        shifted = _shifted(exact, func, args)
        result = compute(exact, func, args, kwargs) if shifted is None else shifted
        return _write(exact, args[0], result)

    return handle


def _out_of_place(rule: Rule) -> Handler:
    compute = _ruled(rule)

    def handle(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = kwargs.pop("out")
        shifted = _shifted(exact, func, args)
        result = compute(exact, func, args, kwargs) if shifted is None else shifted
        return _write(exact, target.resize_(result.shape), result)

    return handle


def _shifted(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """A gradient times or over a power of two, written somewhere: exact, so it is not put on the grid again.

    So a data-parallel trainer divides gradients, which lie on a finer grid, by two or four ranks: in a backward pass,
    or after it. Whatever lies on the grid stays on it, as where the result is a new tensor.
    """
    name = func._schema.name.rstrip("_")
    if name not in ("aten::mul", "aten::div") or len(args) != 2:
        return None
    factor = args[1].item() if isinstance(args[1], Tensor) and args[1].dim() == 0 else args[1]
    if not isinstance(factor, (int, float)) or not math.isfinite(factor) or abs(math.frexp(factor)[0]) != 0.5:
        return None
    x = double(args[0])
    of_a_gradient = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()  # enabled: run again
    if not of_a_gradient and bool(((exact.level(x) == x) | x.isnan()).all()):
        return None
    return x * factor if name == "aten::mul" else x / factor


def _write(exact: Arithmetic, target: Tensor, result: Tensor) -> Tensor:
    """Copies a result into a tensor; one of lower precision takes only what it holds exactly."""
    if target.dtype in LOW_PRECISION and not torch.equal(result.to(target.dtype).double(), result.double()):
        _refuse_low_target(exact, target)
    return target.copy_(result)


def _pass_view(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _pass(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*_promoted(exact, args), **kwargs)
    # What is created in a lower precision lives in float64 from the start.
    return result.double() if isinstance(result, Tensor) and result.dtype in LOW_PRECISION else result


def _pass_in_place(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].dtype in LOW_PRECISION and any(t.is_floating_point() for t in _tensors(args[1:])):
        # The same on a float64 copy; a constant may be written anywhere, as torch does itself.
        return _write(exact, args[0], func(args[0].double(), *args[1:], **kwargs))
    return func(*args, **kwargs)


def _to_copy(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Casts to a lower float type stay in (or go to) float64."""
    _refuse_low_parameter(exact, args[0])
    wanted = kwargs.get("dtype")
    if wanted in LOW_PRECISION or (wanted is None and args[0].dtype in LOW_PRECISION):
        kwargs = {**kwargs, "dtype": torch.float64}
    return func(*args, **kwargs)


def _refuse_floats(exact: Arithmetic, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(t.is_floating_point() or t.is_complex() for t in _tensors((*args, *kwargs.values()))):
        return _refuse(exact, func, args, kwargs)
    return func(*args, **kwargs)


def _refuse(exact: Arithmetic, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = ", ".join(str(tuple(t.shape)) for t in _tensors(args)) or "no tensors"
    raise UnknownOperatorError(
        f"{func} on {shapes} has no exact rule: it may sum or round in an order nobody can vouch for. "
        "Use operators that have one, or add a rule (oracle/exact/rules)."
    )


_HANDLERS: dict[Any, Handler] = {}


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _promoted(exact: Arithmetic, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lower-precision tensors as float64, so that mixed types (float32 buffers) may meet."""
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.dtype.is_complex:
                raise UnknownOperatorError(f"{exact.operator} on complex numbers has no exact rule")
            low = arg.dtype is not torch.float64 and arg.dtype in LOW_PRECISION
        else:
            low = isinstance(arg, (list, tuple))  # may hold tensors
        if low:
            return tuple(_promote(exact, a) for a in args)
    return args


def _promote(exact: Arithmetic, arg: Any) -> Any:
    if isinstance(arg, Tensor) and arg.dtype in LOW_PRECISION:
        _refuse_low_parameter(exact, arg)
        return arg.double()
    return [_promote(exact, a) for a in arg] if isinstance(arg, (list, tuple)) else arg


def _refuse_low_parameter(exact: Arithmetic, tensor: Tensor) -> None:
    if tensor.dtype in LOW_PRECISION and tensor.requires_grad:
        raise PrecisionError(
            f"{exact.operator}: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} that requires "
            "gradients cannot be exact. Convert the model first: model.double()."
        )


def _refuse_low_target(exact: Arithmetic, target: Tensor) -> None:
    if target.dtype in LOW_PRECISION:
        raise PrecisionError(
            f"{exact.operator} writes into a {target.dtype} tensor of shape {tuple(target.shape)}, which "
            "would round. Create it inside exact(), or in float64."
        )


# --- backward on the scaled loss --------------------------------------------------------------------


def _leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors whose ``.grad`` a backward pass from ``roots`` would add to."""
    pending: list[Any] = [t.grad_fn for t in roots]
    leaves = {id(t): t for t in roots if t.grad_fn is None and t.requires_grad}
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ExactError(
                "re-entrant checkpointing hides its parameters from the scaled backward pass: use "
                "use_reentrant=False, or exact(loss_scale=0)"
            )
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        pending.extend(following for following, _ in node.next_functions)
    return list(leaves.values())


def _scaled_backward(
    factor: float,
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """``tensor.backward`` with the root's gradient times ``factor`` and every leaf's divided by it."""
    if factor == 1 or (gradient is None and tensor.numel() != 1):  # nothing to scale, or torch's own error
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
        return
    targets = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
    if any(not target.is_leaf for target in targets):
        raise ExactError("backward(inputs=...) of tensors that are no leaves: use exact(loss_scale=0)")
    root = (torch.ones_like(tensor) if gradient is None else gradient) * factor
    outer, _state.inside_hooks = _state.inside_hooks, False
    hooks = [hook for leaf in _leaves([tensor]) for hook in _around_hooks(leaf, factor)]
    try:
        torch.autograd.backward(tensor, root, retain_graph, create_graph, inputs=inputs)
    finally:
        _state.inside_hooks = outer
        for hook in hooks:
            hook.remove()


def _around_hooks(leaf: Tensor, factor: float) -> tuple[Any, Any]:
    """A hook that divides the leaf's gradient before any other sees it, and one after them."""

    def before(gradient: Tensor) -> Tensor:
        _state.inside_hooks = True
        return _unscaled(gradient, factor)

    def after(_: Tensor) -> None:
        _state.inside_hooks = False

    first = leaf.register_hook(before)
    hooks: Any = leaf._backward_hooks
    for key in [key for key in hooks if key != first.id]:
        hooks[key] = hooks.pop(key)  # autograd calls them in the order they were put in
    return first, leaf.register_hook(after)


@contextmanager
def _unscaling(retained: Iterable[Tensor], factor: float) -> Iterator[None]:
    """Divides what a backward pass leaves in tensors that retain their gradients inside the graph."""
    before = [(tensor, tensor.grad) for tensor in retained]
    for tensor, _ in before:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, old in before:
            new = None if tensor.grad is None else _unscaled(tensor.grad, factor)
            tensor.grad = new if old is None else old if new is None else old + new


def _scaled_grad(
    factor: float, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` likewise."""
    roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if kwargs.get("is_grads_batched") or (grad_outputs is None and any(root.numel() != 1 for root in roots)):
        return torch.autograd.grad(outputs, inputs, grad_outputs, *args, **kwargs)
    given = [None] * len(roots) if grad_outputs is None else grad_outputs
    given = [given] if isinstance(given, Tensor) else given
    scaled = [(torch.ones_like(r) if g is None else g) * factor for r, g in zip(roots, given, strict=True)]
    grads = torch.autograd.grad(roots, inputs, scaled, *args, **kwargs)
    return tuple(None if g is None else _unscaled(g, factor) for g in grads)


def _unscaled(grad: Tensor, factor: float) -> Tensor:
    """grad / factor, exactly: a power of two shifts the grid, so the mode must not level the result."""
    outer, _state.inside_rule = _state.inside_rule, True
    try:
        return grad / factor
    finally:
        _state.inside_rule = outer
