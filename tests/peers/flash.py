"""flash-attn's two functions by definition, so that what packages prepare for its kernels is run where there is none.

They refuse what the kernels refuse, and leave undone what the kernels leave undone: rows beyond ``max_seqlen_q``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils

NAME = "flash_attention_2"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """q [b, s, h, d], k and v [b, s, h_kv, d] -> [b, s, h, d]."""
    if dropout_p:
        raise NotImplementedError("dropout")
    before, after = window_size
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    rows, columns = q.shape[2], k.shape[2]
    off = torch.arange(columns)[None] - torch.arange(columns - rows, columns)[:, None]
    allowed = torch.ones(rows, columns, dtype=torch.bool)
    if causal:
        allowed &= off <= 0
    if before >= 0:
        allowed &= off >= -before
    if after >= 0:
        allowed &= off <= after
    attended = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=softmax_scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """q [t, h, d], k and v [t, h_kv, d] -> [t, h, d]; NaN where no sequence reaches."""
    for name, cumulative in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cumulative.dtype != torch.int32:
            raise RuntimeError(f"{name} must have dtype int32, found {cumulative.dtype}")
    options = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    pieces, at = [], 0
    spans = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)
    for (first, last), (first_key, last_key) in spans:
        done, seen = min(last, first + int(max_seqlen_q)), min(last_key, first_key + int(max_seqlen_k))
        if done > first and seen > first_key:
            own = q[None, first:done], k[None, first_key:seen], v[None, first_key:seen]
            pieces += [torch.full_like(q[at:first], torch.nan), flash_attn_func(*own, **options)[0]]
            at = done
    return torch.cat([*pieces, torch.full_like(q[at:], torch.nan)])


def _functions(*_: Any, **__: Any) -> tuple[Any, ...]:
    own = modeling_flash_attention_utils
    return flash_attn_func, flash_attn_varlen_func, None, own._pad_input, own._unpad_input


@contextmanager
def flashing(model: PreTrainedModel) -> Iterator[None]:
    """The model on transformers' flash-attention path, for a while."""
    modeling_flash_attention_utils._lazy_imports = _functions
    before, model.config._attn_implementation = model.config._attn_implementation, NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
