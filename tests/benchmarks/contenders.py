"""Ways to embed a ragged batch, and the limit: each (model, sequences) -> embeddings [n, d] in the caller's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention
from transformers import PreTrainedModel

import impl
from impl.attention import Window, register
from impl.packing import Packed

Sequences = Sequence[Sequence[int]]
Contender = Callable[[PreTrainedModel, Sequences], Tensor]


def ours(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """impl, as its README says."""
    return impl.encode(model, impl.pack(sequences))


def padded(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """One batch padded right, SDPA under its mask."""
    lengths = torch.tensor([len(ids) for ids in sequences], device=model.device)
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True).to(model.device)
    mask = torch.arange(rows.shape[1], device=model.device) < lengths.unsqueeze(1)
    states = model(input_ids=rows, attention_mask=mask.long(), use_cache=False).last_hidden_state
    return normalize(states[torch.arange(len(rows), device=model.device), lengths - 1], dim=-1)


def padded_by_length(model: PreTrainedModel, sequences: Sequences, pieces: int = 64) -> Tensor:
    """Sorted by length, in so many padded sub-batches."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    size = -(-len(order) // pieces)
    parts = [padded(model, [sequences[i] for i in order[start : start + size]]) for start in range(0, len(order), size)]
    return torch.cat(parts)[torch.tensor(order).argsort()]


def transformers_packed(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """transformers' own packed path: position ids alone, from which it builds a mask of blocks."""
    packed = impl.pack(sequences, "given").to(model.device)
    states = model(
        input_ids=packed.input_ids.unsqueeze(0), position_ids=packed.position_ids.unsqueeze(0), use_cache=False
    ).last_hidden_state[0]
    return normalize(states[packed.last_tokens()], dim=-1)


def flex(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """The same with flex_attention, compiled: no backward pass on a CPU."""
    before = model.config._attn_implementation
    model.set_attn_implementation("flex_attention")
    try:
        return transformers_packed(model, sequences)
    finally:
        model.set_attn_implementation(before)


# --- back ends: what attention may be made of --------------------------------------------------------


def each_sequence(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
    """One SDPA call a sequence."""
    outputs = []
    for qs, ks, vs in zip(*(x.split(list(packed.lengths)) for x in (q, k, v)), strict=True):
        parts = (x.transpose(0, 1).unsqueeze(0) for x in (qs, ks, vs))
        out = scaled_dot_product_attention(*parts, is_causal=len(qs) > 1, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def gathered(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
    """Sequences in the given order; those of one length are gathered, attended and scattered back."""
    starts = packed.cu_seqlens[:-1].tolist()
    alike: dict[int, list[int]] = {}
    for start, length in zip(starts, packed.lengths, strict=True):
        alike.setdefault(length, []).append(start)
    places, outputs = [], []
    for length, own in alike.items():
        index = (torch.tensor(own)[:, None] + torch.arange(length)).flatten().to(q.device)
        parts = (x[index].unflatten(0, (len(own), length)).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*parts, is_causal=length > 1, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        places.append(index)
    return torch.cat(outputs)[torch.cat(places).argsort()]


def nested(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
    """torch.nested's jagged layout."""
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    offsets = packed.cu_seqlens.long()
    parts = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*parts, is_causal=True, scale=scale)
    values: Tensor = out.transpose(1, 2).values()
    return values


class _Unmixed(torch.autograd.Function):
    """Queries as they are, for free; every projection gets a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
        ctx.heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (dq,) = gradients
        return dq, dq[:, : ctx.heads], dq[:, -ctx.heads :]


def nothing(q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
    """No attention at all."""
    out: Tensor = _Unmixed.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


for _backend in (each_sequence, gathered, nested, nothing):
    register(_backend.__name__, _backend)


def through(backend: str, order: str = "given") -> Contender:
    """The model on a packed stream, attention by ``backend``."""

    def run(model: PreTrainedModel, sequences: Sequences) -> Tensor:
        return impl.encode(model, impl.pack(sequences, order), backend=backend)

    return run


def dense_alone(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """The limit's first part: the model on the real tokens, its attention left out."""
    return impl.encode(model, impl.pack(sequences), backend="nothing")


def attention_alone(model: PreTrainedModel, sequences: Sequences, backward: bool) -> Callable[[], None]:
    """The limit's second part: one SDPA call a length and layer, on tensors and gradients that lie ready."""
    config, ready, generator = model.config, [], torch.Generator().manual_seed(0)
    counts = Counter(map(len, sequences))
    for length, count in counts.items():
        shape = count, length, config.head_dim
        q, k, v, gradient = (
            torch.randn(shape[0], heads, *shape[1:], generator=generator).to(model.device, model.dtype)
            for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2, config.num_attention_heads)
        )
        ready.append(([x.requires_grad_(backward) for x in (q, k, v)], gradient))

    def run() -> None:
        with torch.set_grad_enabled(backward):
            for parts, gradient in ready * config.num_hidden_layers:
                out = scaled_dot_product_attention(*parts, is_causal=parts[0].shape[2] > 1, enable_gqa=True)
                if backward:
                    torch.autograd.grad(out, parts, gradient)

    return run


CONTENDERS: dict[str, Contender] = {
    "ours": ours,
    "padded": padded,
    "padded, 64 sorted pieces": padded_by_length,
    "transformers packed": transformers_packed,
    "one SDPA call a sequence": through("each_sequence"),
    "equal lengths gathered": through("gathered"),
    "nested tensors": through("nested"),
    "flex_attention": flex,
}

# Not on a CPU: jagged layouts have no causal kernel there, flex_attention no backward pass (and compiles for
# a minute). sentence-transformers flattens with flash-attn alone; without, it is "padded".
GPU_ONLY = ("nested tensors", "flex_attention")

# What a CPU has neither the time nor the memory for.
MOST_SLOTS, MOST_MASKED = 50_000, 8192


def left_out(name: str, sequences: Sequences, device: str) -> str:
    """Why a contender does not run on this batch here; empty if it does."""
    slots, tokens = len(sequences) * max(map(len, sequences)), sum(map(len, sequences))
    if device == "cuda":
        return ""
    if name in GPU_ONLY:
        return "no such kernel on a CPU"
    if name == "padded" and slots > MOST_SLOTS:
        return f"{slots} slots"
    if name == "transformers packed" and tokens > MOST_MASKED:
        return f"a mask of {tokens} x {tokens}"
    return ""
