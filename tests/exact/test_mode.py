"""The mode as a whole: what it refuses, how it nests, that it restores everything, and the budget."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oracle import exact, reference
from oracle.case import Options, Rows, from_lengths
from oracle.exact import BudgetError, ExactError, PrecisionError, UnknownOperatorError, plain
from oracle.exact.grid import snap
from oracle.models import MODELS, tiny


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- the point of it --------------------------------------------------------------------------------


def test_a_sum_has_the_same_bits_in_every_order_and_in_pieces() -> None:
    x = drawn(997, 3) * 3
    order = torch.randperm(997, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(x.sum(0), x[order].sum(0)), "the canary is dead: plain sums agree in any order"
    with exact():
        whole = x.sum(0)
        assert torch.equal(whole, x[order].sum(0))
        assert torch.equal(whole, x[:500].sum(0) + x[500:].sum(0))
        product = x.T @ x
        assert torch.equal(product, x[order].T @ x[order])
        assert torch.equal(product, x[:500].T @ x[:500] + x[500:].T @ x[500:])


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b,
        lambda a, b: a.matmul(b),
        torch.mv,
        lambda a, b: torch.stack([torch.dot(row, b) for row in a]),
        lambda a, b: (a @ b[:, None])[:, 0],
        lambda a, b: torch.einsum("ij,j->i", a, b),
        lambda a, b: torch.nn.functional.linear(b, a),
    ],
    ids=["matmul", "method", "mv", "dot", "columns", "einsum", "linear"],
)
def test_all_ways_to_write_a_product_have_the_same_bits_and_gradients(
    product: Callable[[Tensor, Tensor], Tensor],
) -> None:
    a, b, weights = drawn(5, 7).requires_grad_(), drawn(7, seed=1).requires_grad_(), drawn(5, seed=2)
    with exact(loss_scale=0):
        expected = torch.mm(a, b[:, None])[:, 0]
        found = product(a, b)
        (found * weights).sum().backward()
    with exact():
        assert torch.equal(expected, found)
        da = snap(weights, 18)[:, None] * snap(b.detach(), 18)
        db = torch.mm(weights[None], a.detach())[0]
    assert torch.equal(a.grad, da)  # type: ignore[arg-type]
    assert torch.equal(b.grad, db)  # type: ignore[arg-type]


def test_outer_products_are_matrix_products() -> None:
    a, b = drawn(4), drawn(3, seed=1)
    with exact():
        assert torch.equal(torch.outer(a, b), torch.mm(a[:, None], b[None]))


# --- the budget -------------------------------------------------------------------------------------


def test_the_budget_raises_with_operator_shapes_and_bits() -> None:
    x = torch.full((40, 4096), 8.0, dtype=torch.float64)
    with exact() as arithmetic:
        with pytest.raises(
            BudgetError, match=r"aten\.mm.*\(40, 4096\) x \(4096, 40\).*54\.0 bits.*exact\(operand=16\)"
        ):
            x @ x.T
        with pytest.raises(BudgetError, match=r"aten\.sum"):
            (x * 8).sum()
    assert arithmetic.bits > 53
    with exact(operand=16) as coarser:
        assert torch.equal((x @ x.T)[0, 0], torch.tensor(4096 * 64.0, dtype=torch.float64))
    assert coarser.bits == 50


def test_the_budget_looks_closer_before_it_refuses() -> None:
    """A huge row meets only zeros: the crude bound is beyond 53 bits, the true one is not."""
    a, b = torch.zeros(4, 64, dtype=torch.float64), torch.ones(64, 4, dtype=torch.float64)
    a[0, 0], b[1, 1] = 2.0**12, 2.0**12
    with exact() as arithmetic:
        a @ b
    assert 47 < arithmetic.bits <= 53


@pytest.mark.parametrize("name", MODELS)
def test_certificate_every_reduction_of_a_training_step_fits(name: str) -> None:
    model = tiny(name)
    with exact() as arithmetic:
        reference.step(
            model, from_lengths([[9, 1, 33], [1, 2, 1, 1]], model=name, options=Options(0.02)), Rows("left", 2, 1)
        )
    assert arithmetic.reductions > 60
    assert 40 < arithmetic.bits <= 53
    for operator, usage in arithmetic.usage.items():
        assert usage.bits <= 53, operator


def test_nan_and_infinities_need_no_bits_and_spread_by_their_own_rules() -> None:
    a = drawn(3, 4)
    a[1] = float("nan")
    with exact():
        product = a @ drawn(4, 2, seed=1)
    assert product[1].isnan().all()
    assert product[[0, 2]].isfinite().all()


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("aten.prod", lambda x: x.prod()),
        ("aten._cdist_forward", lambda x: torch.cdist(x, x)),
        ("aten._linalg_svd", torch.linalg.svdvals),
        ("aten.erfinv", torch.erfinv),
        ("aten._fft_r2c", torch.fft.rfft),
        ("aten.cumprod", lambda x: x.cumprod(0)),
        ("aten.trace", lambda x: x.trace()),
    ],
)
def test_an_operator_without_a_rule_is_refused_by_name(name: str, call: Callable[[Tensor], Tensor]) -> None:
    with exact(), pytest.raises(UnknownOperatorError, match=rf"{name}.*\(4, 4\)"):
        call(drawn(4, 4))


def test_integers_need_no_rule() -> None:
    with exact():
        assert torch.arange(5).prod().item() == 0
        assert torch.tensor([3, 1, 2]).sort()[0].tolist() == [1, 2, 3]


def test_a_float32_model_is_refused_by_name() -> None:
    with torch.random.fork_rng(devices=[]):
        layer = torch.nn.Linear(4, 3)
    with exact(), pytest.raises(PrecisionError, match=r"aten\.\w+.*float32 tensor of shape.*model\.double\(\)"):
        layer(drawn(2, 4))


def test_writing_into_a_float32_tensor_is_refused() -> None:
    with exact(), pytest.raises(PrecisionError, match=r"aten\.add_.*writes into a torch\.float32"):
        BUFFER.add_(drawn(3))
    with exact(), pytest.raises(PrecisionError, match=r"aten\.copy_.*writes into"):
        BUFFER.copy_(drawn(3))
    with exact():
        BUFFER.zero_()


BUFFER = torch.zeros(3)


# --- float types ------------------------------------------------------------------------------------


def test_down_casts_stay_in_float64_and_keep_every_bit() -> None:
    x = drawn(5)
    with exact():
        for cast in (
            x.float(),
            x.to(torch.bfloat16),
            x.half(),
            x.type(torch.float32),
            torch.softmax(x, 0, dtype=torch.float32),
        ):
            assert cast.dtype == torch.float64
        assert torch.equal(x.float().double(), x)
        assert torch.arange(3).float().dtype == torch.float64
        assert torch.zeros(2).dtype == torch.zeros(2, dtype=torch.float16).dtype == torch.float64
        assert x.long().dtype == torch.int64


def test_float32_buffers_may_meet_float64() -> None:
    buffer, x = torch.tensor([0.1, 0.2]), drawn(3, 2)
    with exact():
        assert torch.equal(x @ torch.diag(buffer), x @ torch.diag(buffer.double()))
        assert (x * buffer).dtype == torch.float64
        assert torch.equal(torch.cat([x, buffer[None]])[-1], buffer.double())


def test_gradients_flow_through_a_cast() -> None:
    x = drawn(5).requires_grad_()
    with exact():
        (x.float() * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 2.0, dtype=torch.float64))  # type: ignore[arg-type]


# --- in place, out= ---------------------------------------------------------------------------------


def test_in_place_and_out_forms_have_the_bits_of_the_plain_ones() -> None:
    x, y = drawn(4, 4), drawn(4, 4, seed=1)
    with exact():
        for name in ("mul", "div", "add", "sub", "exp", "sigmoid", "sqrt", "clamp_min", "masked_fill"):
            arguments = {"clamp_min": (0.1,), "masked_fill": (y > 0, 0.0)}.get(
                name, (y,) if name in ("mul", "div", "add", "sub") else ()
            )
            plain = getattr(x.abs(), name)(*arguments)
            assert torch.equal(getattr(x.abs(), f"{name}_")(*arguments), plain), name
        out = torch.empty(4, 4, dtype=torch.float64)
        torch.mm(x, y, out=out)
        assert torch.equal(out, x @ y)


# --- nesting, threads, restoring --------------------------------------------------------------------


def test_nesting_changes_nothing_and_the_innermost_grid_rules() -> None:
    x = drawn(30, 30)
    with exact():
        expected = x @ x
    with exact() as outer, exact(), outer:
        assert torch.equal(x @ x, expected)
    with exact(), exact(operand=6):
        coarse = x @ x
    with exact(operand=6):
        assert torch.equal(x @ x, coarse)
    assert not torch.equal(coarse, expected)


def test_one_object_may_be_entered_again() -> None:
    arithmetic = exact()
    for _ in range(2):
        with arithmetic, arithmetic:
            drawn(3).sum()
    assert arithmetic.reductions == 2


def test_everything_is_restored_even_after_an_error() -> None:
    x = drawn(997) * 30
    plain = x.sum()
    for error in (UnknownOperatorError, RuntimeError):
        with pytest.raises(error), exact():  # noqa: PT012
            if error is UnknownOperatorError:
                x.prod()
            raise RuntimeError("elsewhere")
        assert torch.equal(x.sum(), plain)
        assert x.float().dtype == torch.float32
        assert x.prod().dtype == torch.float64
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def _gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    x = drawn(6, 6).requires_grad_()
    function(x).backward()
    assert x.grad is not None
    return x.grad


def _deep(x: Tensor, depth: int, reentrant: bool) -> Tensor:
    if depth == 0:
        return torch.softmax(x @ x.T, 1)
    return checkpoint(_deep, x, depth - 1, reentrant, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_deep_enough_to_change_threads_stays_exact(
    reentrant: bool, request: pytest.FixtureRequest
) -> None:
    """Re-entrant backward passes beyond depth 60 run on another of autograd's threads."""
    depth = 70 if reentrant else 3
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    request.addfinalizer(lambda: sys.setrecursionlimit(limit))
    with exact(loss_scale=0):
        expected = _gradient(lambda x: _deep(x, 0, reentrant).pow(2).sum())
        found = _gradient(lambda x: _deep(x, depth, reentrant).pow(2).sum())
    plain = _gradient(lambda x: _deep(x, 0, reentrant).pow(2).sum())
    assert torch.equal(expected, found)
    assert not torch.equal(expected, plain)


def test_threads_do_not_see_each_others_mode() -> None:
    x = drawn(997) * 30
    plain = x.sum()
    with exact():
        inside = x.sum()
    arithmetic, found, barrier = exact(), {}, threading.Barrier(2, timeout=30)

    def work(name: str, mode: bool) -> None:
        if mode:
            with arithmetic:
                barrier.wait()
                found[name] = x.sum()
                barrier.wait()
        else:
            barrier.wait()
            found[name] = x.sum()
            barrier.wait()

    threads = [threading.Thread(target=work, args=(name, name == "exact")) for name in ("exact", "plain")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert torch.equal(found["exact"], inside)
    assert torch.equal(found["plain"], plain)


def test_backward_in_another_thread_that_enters_the_mode_is_exact() -> None:
    x = drawn(6, 6).requires_grad_()
    with exact():
        expected = _gradient(lambda t: torch.softmax(t @ t.T, 1).pow(2).sum())
        loss = torch.softmax(x @ x.T, 1).pow(2).sum()

    def backward() -> None:
        with exact():
            loss.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(30)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


# --- the scaled loss --------------------------------------------------------------------------------


def test_small_gradients_survive_and_accumulate_as_if_unscaled() -> None:
    """A gradient of 2^-24 is below the grid of operands; on the scaled loss it is not."""
    weight, x = torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True), torch.ones(1, 1, dtype=torch.float64)
    for scale, expected in ((0, 0.0), (8, 2.0**-24)):
        weight.grad = None
        with exact(loss_scale=scale):
            for times in (1, 2):
                ((x @ weight) * 2.0**-24).sum().backward()
                assert weight.grad is not None
                assert weight.grad.item() == times * expected


def test_autograd_grad_and_given_gradients_are_scaled_back() -> None:
    x = drawn(3).requires_grad_()
    with exact():
        (alone,) = torch.autograd.grad((x * 3).sum(), x)
        (given,) = torch.autograd.grad(x * 3, x, torch.full((3,), 2.0, dtype=torch.float64))
        (x * 3).backward(torch.full((3,), 2.0, dtype=torch.float64))
    assert alone.tolist() == [3.0] * 3
    assert given.tolist() == [6.0] * 3
    assert x.grad.tolist() == [6.0] * 3  # type: ignore[union-attr]


def test_backward_leaves_no_hooks_behind() -> None:
    x = drawn(3).requires_grad_()
    with exact():
        (x * 3).sum().backward()
    assert not x._backward_hooks
    x.grad = None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3.0] * 3  # type: ignore[union-attr]


def test_hooks_and_retained_gradients_see_unscaled_values() -> None:
    x, seen = drawn(3).requires_grad_(), []
    x.register_hook(lambda grad: seen.append(grad.clone()))
    with exact():
        y = x * 2
        y.retain_grad()
        y.sum().backward()
    assert y.grad.tolist() == [1.0] * 3  # type: ignore[union-attr]
    assert seen[0].tolist() == x.grad.tolist() == [2.0] * 3  # type: ignore[union-attr]


def test_a_backward_pass_in_a_leafs_hook_is_scaled_as_any_other() -> None:
    """sentence-transformers' gradient cache hangs its second pass on the loss, a leaf there."""
    tiny = 2.0**-24
    weight, x = torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True), torch.ones(1, 1, dtype=torch.float64)
    other = torch.ones(1, dtype=torch.float64, requires_grad=True)

    @torch.enable_grad()
    def again(gradient: Tensor) -> None:
        for _ in range(2):
            ((x @ weight) * tiny * gradient).sum().backward()

    with exact(loss_scale=8):
        loss = torch.ones((), dtype=torch.float64).requires_grad_()
        loss.register_hook(again)
        (loss * 1.0 + (other * tiny).sum()).backward()
    assert weight.grad is not None
    assert other.grad is not None
    assert (weight.grad.item(), other.grad.item(), float(loss.grad or 0)) == (2 * tiny, tiny, 1.0)


def test_stored_gradients_come_out_of_a_product_as_they_went_in() -> None:
    """The second pass of a gradient cache as most have it: the dot product with the gradients of the first."""
    stored = torch.tensor([1 / 3 * 2.0**-10, 0.7, 2.0**-30], dtype=torch.float64)
    given, product = (drawn(3).requires_grad_() for _ in range(2))
    with exact():
        (given * 1.0).backward(stored)
        torch.dot((product * 1.0).flatten(), stored).backward()
    assert given.grad is not None
    assert product.grad is not None
    assert product.grad.tolist() == given.grad.tolist()


def test_what_scaling_cannot_reach_is_refused() -> None:
    x, layer = drawn(2, 4).requires_grad_(), torch.nn.functional.linear
    weight = drawn(3, 4, seed=1).requires_grad_()
    with exact():
        y = x * 2
        with pytest.raises(ExactError, match="no leaves: use exact"):
            y.sum().backward(inputs=[y])
        with pytest.raises(ExactError, match="re-entrant checkpointing hides its parameters"):
            checkpoint(lambda t: layer(t, weight), x, use_reentrant=True).sum().backward()
        with pytest.raises(RuntimeError, match="scalar outputs"):
            (x * 2).backward()
        with pytest.raises(RuntimeError, match="scalar outputs"):
            torch.autograd.grad(x * 2, x)
    with exact(loss_scale=0):  # as the message says
        y = x * 2
        y.sum().backward(inputs=[y])
        checkpoint(lambda t: layer(t, weight), x, use_reentrant=True).sum().backward()
    assert weight.grad is not None


COMPLEX = torch.complex(torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda q: torch.nn.functional.scaled_dot_product_attention(q, q * 2, q * 3),
        lambda q: torch.nn.functional.scaled_dot_product_attention(q[None], q[None] * 2, q[None] * 3),
        lambda q: q @ q[0, 0],
    ],
)
def test_checkpointed_functions_have_the_plain_bits(function: Callable[[Tensor], Tensor]) -> None:
    gradients = []
    for again in (False, True):
        q = drawn(4, 5, 8).requires_grad_()
        with exact():
            out = checkpoint(function, q, use_reentrant=False) if again else function(q)
            out.pow(2).sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("aten.scatter", lambda x: torch.scatter(x, 0, torch.zeros(4, 4, dtype=torch.int64), x, reduce="add")),
        ("aten.bincount", lambda x: torch.bincount(torch.zeros(4, dtype=torch.int64), x[0])),
        ("aten.sum", lambda x: COMPLEX.sum()),
    ],
)
def test_sums_in_disguise_are_refused(name: str, call: Callable[[Tensor], Tensor]) -> None:
    with exact(), pytest.raises(UnknownOperatorError, match=name):
        call(drawn(4, 4))


def test_adding_numbers_off_the_grid_is_associative() -> None:
    a, b, c = drawn(1000), drawn(1000, seed=1), drawn(1000, seed=2)
    assert not torch.equal((a + b) + c, a + (b + c))
    with exact():
        a, b, c = (x.mul(1.0) for x in (a, b, c))
        assert torch.equal((a + b) + c, a + (b + c))
        assert torch.equal(torch.stack([a, b, c]).sum(0), (c + a) + b)


def test_a_bias_off_the_grid_is_the_same_fused_or_added() -> None:
    x, weight, bias = drawn(5, 4), drawn(3, 4, seed=1), drawn(3, seed=2)
    with exact():
        assert torch.equal(torch.nn.functional.linear(x, weight, bias), x @ weight.T + bias)


def test_integers_divide_in_float64() -> None:
    lengths = torch.tensor([3, 7])
    with exact():
        for found, expected in ((1 / lengths, [1 / 3, 1 / 7]), (lengths / 10, [0.3, 0.7]), (lengths * 0.1, [0.3, 0.7])):
            assert found.dtype == torch.float64
            assert found.tolist() == pytest.approx(expected, abs=2.0**-36)


def test_an_optimizer_may_step_inside() -> None:
    weight = drawn(3).requires_grad_()
    before = weight.detach().clone()
    with exact():
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        (weight * 3).sum().backward()
        optimizer.step()
    assert not torch.equal(weight.detach(), before)


def test_functions_take_their_keyword_arguments() -> None:
    a, b = drawn(4, 3), drawn(5, 3, seed=1)
    with exact():
        expected = a @ b.T
        assert torch.equal(torch.nn.functional.linear(input=a, weight=b), expected)
        assert torch.equal(torch.matmul(input=a, other=b.T), expected)
        assert torch.softmax(a[0, 0], 0).item() == 1


def test_wrong_calls_of_attention_are_refused() -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k = drawn(1, 4, 5, 8), drawn(1, 2, 5, 8)
    with exact():
        with pytest.raises(RuntimeError, match="4 query and 2 key heads need enable_gqa=True"):
            sdpa(q, k, k)
        with pytest.raises(RuntimeError, match="attn_mask must be bool or float"):
            sdpa(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.int64))


def test_a_longest_sequence_given_too_small_is_refused() -> None:
    from torch.nn.attention.varlen import varlen_attn

    q, cu = drawn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with exact(), pytest.raises(ValueError, match="max_q is 2, the longest sequence has 4 tokens"):
        varlen_attn(q, q, q, cu, cu, 2, 4)


def test_a_scatters_start_counts_in_the_budget() -> None:
    start, index = torch.tensor([2.0**20], dtype=torch.float64), torch.zeros(9, dtype=torch.int64)
    with exact(), pytest.raises(BudgetError, match="index_add"):
        start.index_add(0, index, drawn(9))


def test_a_paged_varlen_call_is_refused() -> None:
    from torch.nn.attention.varlen import varlen_attn

    q, cu = drawn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with exact(), pytest.raises(ExactError, match="paged"):
        varlen_attn(q, q, q, cu, cu, 4, 4, seqused_k=torch.tensor([4], dtype=torch.int32))
    with exact(), pytest.raises(ExactError, match="must rise from 0"):
        varlen_attn(q, q, q, cu + 1, cu + 1, 4, 4)


class _ManySteps(torch.autograd.Function):
    """A backward node that calls more of torch's functions than Python may nest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 3
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0]
        for _ in range(2 * sys.getrecursionlimit()):
            gradient = gradient.view(len(gradient), -1)
        return torch.nn.functional.linear(gradient, torch.eye(4, dtype=torch.float64)) * ctx.factor


def test_a_long_backward_node_does_not_pile_modes_up() -> None:
    x = drawn(5, 4).requires_grad_()
    with exact():
        _ManySteps.apply(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5, 4), 3.0, dtype=torch.float64))


# --- plain float64 ----------------------------------------------------------------------------------


def test_plain_is_float64_throughout() -> None:
    x = drawn(3, 5)
    with plain():
        assert x.float().dtype is torch.float64
        assert torch.softmax(x, -1, dtype=torch.float32).dtype is torch.float64
        assert torch.zeros(2).dtype is torch.float64
        assert (torch.arange(3.0) @ x).dtype is torch.float64
        assert torch.equal((x.float() * 3).sum(0), (x * 3).sum(0))
    assert x.float().dtype is torch.float32


@pytest.mark.parametrize("name", MODELS)
def test_plain_is_close_to_exact_and_has_the_accuracy_of_float64(name: str) -> None:
    case, model = from_lengths([[3, 1, 7], [9, 2]], model=name), tiny(name)
    with plain():
        padded, wider = (reference.step(model, case, layout).embeddings for layout in (Rows(), Rows(extra=9)))
    with exact():
        snapped = reference.step(model, case, Rows()).embeddings
    assert float((padded - wider).abs().max()) < 1e-13
    assert 0 < float((padded - snapped).abs().max()) < 1e-2


def test_a_loss_divided_in_place_has_the_bits_of_one_divided() -> None:
    x = torch.tensor([1.0, 3 * 2.0**-36], dtype=torch.float64, requires_grad=True)
    with exact():
        expected = (x + 0).sum() / 2
        found = (x + 0).sum()
        found /= 2
        assert torch.equal(found, expected)
        found.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.5]


def halved(x: Tensor) -> Tensor:
    """Half of what it is given, in place; so some models scale their states."""
    y = x + 0
    y /= 2
    return y


def test_a_state_halved_in_place_has_the_same_bits_without_gradients_and_run_again() -> None:
    x = torch.tensor([3 * 2.0**-36, torch.nan], dtype=torch.float64, requires_grad=True)
    seen: list[float] = []

    def block(x: Tensor) -> Tensor:
        seen.append(halved(x)[0].item())
        return halved(x).square()  # which wants its operand again

    with exact():
        expected = ((x + 0) / 2)[0].item()
        with torch.no_grad():
            assert halved(x)[0].item() == expected
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert seen == [expected, expected]


def halve_gradient(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad /= 2


def test_a_gradient_halved_in_place_loses_no_bit_in_a_backward_pass_or_after_it() -> None:
    x = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    fine, coarse = 3 * 2.0**-40, 3 * 2.0**-36
    with exact():
        (x * torch.tensor([1.0, fine * 2**4], dtype=torch.float64)).sum().mul(2.0**-4).backward()
        assert x.grad is not None
        x.grad /= 2
        assert x.grad[1].item() == fine / 2
        y = torch.ones(1, dtype=torch.float64, requires_grad=True)
        y.register_post_accumulate_grad_hook(halve_gradient)
        (y * coarse).sum().backward()
    assert y.grad is not None
    assert y.grad.item() == coarse / 2
