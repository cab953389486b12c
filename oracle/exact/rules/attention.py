"""Fused attention kernels by their definition: scores, mask, softmax, weighted sum of values.

The operations and their order are those of transformers' eager attention, so a fused kernel under the
exact mode has the eager computation's bits. Kernels that have no CPU code run here too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oracle.exact.grid import Arithmetic, ExactError
from oracle.exact.rules.softmax import safe_softmax, softmax, softmax_backward
from oracle.exact.rules.table import rule

# A window of -1 does not limit that side; Window = (keys to the left, keys to the right).
Window = tuple[int, int]


def attention_weights(exact: Arithmetic, q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T scale + bias) for q [..., Lq, d] and k [..., Lk, d]; zero rows where all is masked."""
    scores = exact.level(exact.product(q, k.transpose(-1, -2)) * scale)
    return exact.level(softmax(exact, scores, -1) if bias is None else safe_softmax(exact, scores + bias, -1))


def attend(exact: Arithmetic, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention output [..., Lq, dv]."""
    return exact.product(attention_weights(exact, q, k, bias, scale), v)


def attend_backward(
    exact: Arithmetic, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    p = attention_weights(exact, q, k, bias, scale)
    dv = exact.product(p.transpose(-1, -2), grad)
    dp = exact.product(grad, v.transpose(-1, -2))
    ds = exact.level(exact.level(softmax_backward(exact, dp, p, -1)) * scale)
    return exact.product(ds, k), exact.product(ds.transpose(-1, -2), q), dv


def visible(queries: int, keys: int, window: Window, device: torch.device) -> Tensor:
    """[queries, keys] booleans: which key each query may see, aligned at the bottom right."""
    left, right = window
    offset = (torch.arange(keys, device=device)[None] - (keys - queries)) - torch.arange(queries, device=device)[
        :, None
    ]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    return seen


def as_bias(mask: Tensor | None) -> Tensor | None:
    """A boolean mask (True: visible) as 0 and -inf; a float mask as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill_(~mask, -math.inf)


def _heads(x: Tensor, heads: int) -> Tensor:
    """Key or value heads repeated for grouped queries: [..., h, L, d] -> [..., heads, L, d]."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def _fold(exact: Arithmetic, grad: Tensor, heads: int) -> Tensor:
    """The gradient of ``_heads``: sums over the queries' heads that share a key head."""
    if grad.shape[-3] == heads:
        return grad
    return exact.total(grad.unflatten(-3, (heads, -1)), [grad.dim() - 2])


# --- torch.nn.functional.scaled_dot_product_attention: the CPU kernel -------------------------------


def _causal_bias(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor | None:
    if not is_causal:
        return as_bias(mask)
    # torch aligns its causal mask at the top left.
    lower = as_bias(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril())
    given = as_bias(mask)
    return lower if given is None or lower is None else lower + given


@rule("aten::_scaled_dot_product_flash_attention_for_cpu", on_grid=True)
def sdpa_cpu(
    exact: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [n, h, L, d], and a placeholder for the log-sum-exp, which our backward does not need."""
    if dropout_p:
        raise ExactError(f"{exact.operator}: dropout inside a fused kernel cannot be replayed")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = _causal_bias(q, k, is_causal, attn_mask)
    out = attend(exact, q, _heads(k, q.shape[-3]), _heads(v, q.shape[-3]), bias, scale)
    return out, q.new_zeros(q.shape[:-1], dtype=torch.float64)


@rule("aten::_scaled_dot_product_flash_attention_for_cpu_backward", on_grid=True)
def sdpa_cpu_backward(
    exact: Arithmetic,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = _causal_bias(q, k, is_causal, attn_mask)
    heads = q.shape[-3]
    dq, dk, dv = attend_backward(exact, grad, q, _heads(k, heads), _heads(v, heads), bias, scale)
    return dq, _fold(exact, dk, k.shape[-3]), _fold(exact, dv, v.shape[-3])


# --- torch.nn.attention.varlen.varlen_attn: no CPU kernel exists ------------------------------------


def _spans(exact: Arithmetic, cu_seqlens: Tensor, rows: int, name: str) -> list[tuple[int, int]]:
    ends = [int(e) for e in cu_seqlens.tolist()]
    if ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)) or ends[-1] > rows:
        raise ExactError(f"{exact.operator}: {name} must rise from 0 to at most {rows} rows, found {ends}")
    return list(itertools.pairwise(ends))


def _sequences(
    exact: Arithmetic, q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor | None, window: Window
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Each sequence's rows of q and of k, and its mask."""
    spans_q = _spans(exact, cu_q, q.shape[0], "cu_seq_q")
    spans_k = spans_q if cu_k is None else _spans(exact, cu_k, k.shape[0], "cu_seq_k")
    for (q0, q1), (k0, k1) in zip(spans_q, spans_k, strict=True):
        if q1 > q0:
            bias = None if window == (-1, -1) else as_bias(visible(q1 - q0, k1 - k0, window, q.device))
            yield slice(q0, q1), slice(k0, k1), bias


def _window(is_causal: bool, window_size: list[int] | None) -> Window:
    left, right = window_size or (-1, -1)
    return left, 0 if is_causal else right


@rule("torch_attn::_varlen_attn", on_grid=True)
def varlen(
    exact: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *paged: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence after another: q [T, h, d], k and v [T, h_kv, d] -> output [T, h, d]."""
    if any(p is not None for p in paged):
        raise ExactError(f"{exact.operator}: paged or split keys have no exact rule")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for name, cu, most in (("max_q", cu_q, max_q), ("max_k", cu_q if cu_k is None else cu_k, max_k)):
        longest = int(cu.diff().max()) if len(cu) > 1 else 0
        if most < longest:  # a kernel would leave out what lies beyond
            raise ValueError(f"{exact.operator}: {name} is {most}, the longest sequence has {longest} tokens")
    out = torch.zeros_like(q, dtype=torch.float64)
    for rows, cols, bias in _sequences(exact, q, k, cu_q, cu_k, _window(is_causal, window_size)):
        qs, ks, vs = (x.transpose(0, 1) for x in (q[rows], k[cols], v[cols]))
        out[rows] = attend(exact, qs, _heads(ks, q.shape[1]), _heads(vs, q.shape[1]), bias, scale).transpose(0, 1)
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float64)
    return out, lse, torch.zeros(2, dtype=torch.uint64, device=q.device)


@rule("torch_attn::_varlen_attn_backward", on_grid=True)
def varlen_backward(
    exact: Arithmetic,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads, kv_heads = q.shape[1], k.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    for rows, cols, bias in _sequences(exact, q, k, cu_q, cu_k, _window(is_causal, window_size)):
        gs, qs, ks, vs = (x.transpose(0, 1) for x in (grad[rows], q[rows], k[cols], v[cols]))
        a, b, c = attend_backward(exact, gs, qs, _heads(ks, heads), _heads(vs, heads), bias, scale)
        dq[rows] = a.transpose(0, 1)
        dk[cols] = _fold(exact, b, kv_heads).transpose(0, 1)
        dv[cols] = _fold(exact, c, kv_heads).transpose(0, 1)
    return dq, dk, dv


# --- torch.nn.functional.scaled_dot_product_attention itself ----------------------------------------


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The public function, composed of operators that have rules; whatever back end torch would pick."""
    if attn_mask is not None and not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise RuntimeError(f"scaled_dot_product_attention: attn_mask must be bool or float, found {attn_mask.dtype}")
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key)]
    if not enable_gqa and heads[0] != heads[1] and 1 not in heads:
        raise RuntimeError(
            f"scaled_dot_product_attention: {heads[0]} query and {heads[1]} key heads need enable_gqa=True"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    learned = attn_mask is not None and attn_mask.requires_grad
    alike = query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    alike = alike and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
    if alike and not dropout_p and not learned:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if enable_gqa:
        key, value = _heads(key, query.shape[-3]), _heads(value, query.shape[-3])
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    bias = _causal_bias(query, key, is_causal, attn_mask)
    weights = torch.ops.aten._safe_softmax(scores if bias is None else scores + bias, -1)
    return torch.matmul(torch.nn.functional.dropout(weights, dropout_p), value)
