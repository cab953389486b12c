"""Variable-length attention: back ends, and their registration with transformers.

A back end takes q [T, h, d], k and v [T, h_kv, d] of a packed stream and its ``Packed``, and lets each
token attend within its own sequence. Three exist: ``flash_attn`` (the package's kernel), ``varlen``
(torch.nn.attention.varlen) and ``sdpa`` (torch's scaled_dot_product_attention over equal lengths).
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from impl import mixers
from impl.errors import BackendError
from impl.packing import Packed

# How many keys to the left and right a query sees; -1: no limit. A causal model has right 0.
Window = tuple[int, int]
Backend = Callable[[Tensor, Tensor, Tensor, Packed, Window, float], Tensor]

PREFIX = "padding_free_"


def registered(name: str) -> str:
    """What transformers knows a back end by. Without the word flash, which it would take for its own kernels."""
    return PREFIX + name.replace("flash_attn", "fa")


# Which back ends really ran, by name: one count a layer.
ran: Counter[str] = Counter()


def sdpa(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
    """One call for each run of equal lengths: its rows are a plain view [count, length, heads, d].

    The runs are split, not sliced: a slice's gradient is a zero tensor as large as the stream.
    """
    sizes = [length * count for length, count in packed.runs]
    grouped = q.shape[1] != k.shape[1]
    outputs = []
    for (length, count), *parts in zip(packed.runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        qs, ks, vs = (x.unflatten(0, (count, length)).transpose(1, 2) for x in parts)
        mask = _mask(length, window, q.device)
        causal = mask is None and window[1] == 0 and length > 1
        out = scaled_dot_product_attention(qs, ks, vs, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _mask(length: int, window: Window, device: torch.device) -> Tensor | None:
    """[length, length] booleans where the window cuts anything that causality alone does not."""
    left, right = window
    if (left < 0 or left >= length - 1) and (right <= 0 or right >= length - 1):
        return None
    distance = torch.arange(length, device=device)[None, :] - torch.arange(length, device=device)[:, None]
    seen = distance >= -left if left >= 0 else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance <= right) if right >= 0 else seen


def varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn: one kernel over the whole stream."""
    from torch.nn.attention.varlen import varlen_attn

    cu, most = packed.cu_seqlens, packed.max_seqlen
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, cu, cu, most, most, scale=scale, window_size=window, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out


def flash_attn(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
    """flash_attn.flash_attn_varlen_func, version 2's arguments."""
    from flash_attn import flash_attn_varlen_func

    cu, most = packed.cu_seqlens, packed.max_seqlen
    out: Tensor = flash_attn_varlen_func(
        q, k, v, cu, cu, most, most, softmax_scale=scale, causal=window[1] == 0, window_size=window
    )
    return out


# Those that transformers knows: these and, where it is imported, ``sharding``'s.
REGISTERED: set[str] = set()

BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "varlen": varlen, "flash_attn": flash_attn}


def choose(device: torch.device, dtype: torch.dtype) -> str:
    """The back end for a device and dtype: a varlen kernel for half precision on CUDA, else sdpa."""
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return "flash_attn" if importlib.util.find_spec("flash_attn") else "varlen"
    return "sdpa"


def check_backend(name: str) -> str:
    """The name, if there is such a back end and it can be imported."""
    if name not in REGISTERED:
        raise BackendError(f"no attention back end {name!r}; there are {', '.join(BACKENDS)}")
    if name == "flash_attn" and not importlib.util.find_spec("flash_attn"):
        raise BackendError("the back end flash_attn needs the package flash-attn: pip install padding-free-oracle[gpu]")
    return name


def _interface(name: str, backend: Backend) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        packing: Packed | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention interface: query [1, h, T, d] -> ([1, T, h, d], None)."""
        if packing is None:
            raise BackendError(f"attention {registered(name)} needs the stream's boundaries: call impl.encode()")
        asked = {"dropout": dropout, "softcap": softcap, "attention sinks": s_aux, "position bias": position_bias}
        for feature, value_asked in asked.items():
            if value_asked is not None and not (feature == "dropout" and dropout == 0):
                raise BackendError(f"the model asks for {feature}, which padding-free attention does not offer")
        causal = module.is_causal if is_causal is None else is_causal
        # transformers' sliding window counts the query's own position.
        reach = -1 if sliding_window is None else sliding_window - 1
        window = (reach, 0 if causal else reach)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = backend(q, k, v, packing, window, scale)
        ran[name] += 1
        return out.unsqueeze(0), None

    return forward


def register(name: str, backend: Backend) -> None:
    """Offers a back end to transformers, which builds no mask for it: no mask function has its name."""
    REGISTERED.add(name)
    AttentionInterface.register(registered(name), _interface(name, backend))


for _name, _backend in BACKENDS.items():
    register(_name, _backend)


def install(model: PreTrainedModel, backend: str | None = None) -> None:
    """Gives the model padding-free attention for good, and takes its cache away.

    Needed with gradient checkpointing, which computes layers again when the forward pass is long over.
    """
    name = check_backend(backend or choose(model.device, model.dtype))
    text = model.get_decoder()
    text.set_attn_implementation(registered(name))
    mixers.install(model)
    if hasattr(text.config, "use_cache"):
        text.config.use_cache = False


@contextmanager
def using(model: PreTrainedModel, backend: str) -> Iterator[None]:
    """The model with padding-free attention for a while, and without a cache.

    A multimodal model's vision tower, which packs its images itself, keeps its own.
    """
    text = model.get_decoder()
    config = text.config
    if config._attn_implementation == registered(backend):
        yield
        return
    again = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if again and model.training and torch.is_grad_enabled():
        raise BackendError(
            "gradient checkpointing computes layers again after this call: impl.attention.install(model) first"
        )
    before, cached = config._attn_implementation, getattr(config, "use_cache", None)
    text.set_attn_implementation(registered(check_backend(backend)))
    if cached is not None:
        config.use_cache = False
    try:
        with mixers.within_sequences(model):
            yield
    finally:
        text.set_attn_implementation(before)
        if cached is not None:
            config.use_cache = cached
