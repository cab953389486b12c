"""What the varlen kernels are given: checked against their signatures, without a GPU.

A tensor on the device "meta" has no values: whatever asks for one, as a host does that waits for its GPU, is an error.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

import impl
from impl import attention, losses, pack
from impl.encoder import POOLINGS
from impl.losses import InfoNCE
from impl.packing import Packed
from oracle.exact import exact
from oracle.models import tiny

SEQUENCES = [[5, 6, 7], [8], [9, 10], [11], [12, 13, 14, 15, 16]]


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
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2.8's signature; causal counts as a window without anything to the right, as there."""
    unused = (dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs, block_table)
    assert unused == (0.0, 0.0, None, False, False, None)
    window = (window_size[0], 0) if causal else window_size
    return kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)


def varlen_attn(*given: Any, **named: Any) -> Tensor:
    """torch's, by its own signature."""
    found = inspect.signature(TORCHS).bind(*given, **named).arguments
    grouped = found.pop("enable_gqa", False)
    assert grouped == (found["query"].shape[1] != found["key"].shape[1])
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size")
    assert found.keys() == set(names)
    return kernel(*(found[name] for name in names))


TORCHS: Callable[..., Any] = varlen.varlen_attn


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    most_q: int,
    most_k: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """What both demand; then attention as it is defined, or nothing where there are no values."""
    assert type(most_q) is int
    assert type(most_k) is int
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert len({x.device for x in (q, k, v, cu_q, cu_k)}) == 1
    assert len({x.dtype for x in (q, k, v)}) == 1
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the last dimension must lie together"
    assert cu_q.is_contiguous()
    if q.is_meta:
        return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)
    lengths = tuple(cu_q.diff().tolist())
    assert most_q == most_k == max(lengths)
    assert torch.equal(cu_q, cu_k)
    assert scale is not None
    packed = Packed(cu_q, cu_q, cu_q, lengths, tuple(range(len(lengths))))
    return attention.sdpa(q, k, v, packed, window, scale)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "bert", "modernbert"])
def test_kernels_are_called_by_their_signatures_and_mean_the_same(name: str, backend: str) -> None:
    """Causal ones, windows to one side and to both."""
    with exact():
        found, expected = (impl.encode(tiny(name), pack(SEQUENCES), backend=b) for b in (backend, "sdpa"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
def test_nothing_waits_for_the_device(backend: str, pooling: str) -> None:
    model = copy.deepcopy(tiny("qwen3")).to("meta")
    found = impl.encode(model, pack(SEQUENCES), pooling, backend)
    assert (found.device.type, found.shape) == ("meta", (5, model.config.hidden_size))
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_batch": False},
        {"include_qq": True, "include_dd": True, "mask_fake_negative": True, "hard_negatives": 2},
        {"paper": True},
    ],
)
def test_a_loss_waits_only_to_see_that_its_embeddings_are_sound(
    options: dict[str, Any], chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.empty(8, 4, device="meta").requires_grad_()
    loss = InfoNCE(chunk=chunk, **options)
    with pytest.raises(RuntimeError, match="meta"):
        loss(rows, [1, 0, 0, 1, 0, 0])
    monkeypatch.setattr(losses, "check_embeddings", lambda *arguments: None)
    loss(rows, [1, 0, 0, 1, 0, 0]).backward()
    assert rows.grad is not None


def test_waiting_is_seen() -> None:
    with pytest.raises(RuntimeError, match=r"meta"):
        bool(torch.empty(1, device="meta").any())
