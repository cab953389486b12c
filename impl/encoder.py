"""Any Hugging Face text model on a packed stream: pooled, normalised embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl.attention import choose, ran, using
from impl.errors import BackendError, PackingError
from impl.packing import Packed

# Tokens that go through the model at once on a CPU: more leave its caches, and every tensor is mapped anew.
PIECE = 2048


def hidden_states(
    model: PreTrainedModel, packed: Packed, backend: str | None = None, inputs: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The last hidden states [T, d] of the stream, each token seeing its own sequence only.

    On a CPU a long stream of texts goes through the model in pieces of whole sequences, one call each.

    Args:
        model: a decoder or encoder whose attention goes through transformers' AttentionInterface.
        packed: on any device; moved to the model's.
        backend: "sdpa", "varlen" or "flash_attn"; None chooses by device and dtype.
        inputs: further inputs of the model: a multimodal one's pixel_values and image_grid_thw, the images
            in stream order (``multimodal.in_stream_order``).

    Raises:
        BackendError: the back end is unknown, cannot run here, or the model went round it.
    """
    packed = packed.to(model.device)
    name = backend or choose(model.device, model.dtype)
    if inputs or model.device.type != "cpu":
        return states_of(model, name, packed.input_ids, packed.position_ids, packed, inputs)
    with using(model, name):
        pieces = packed.pieces(PIECE)
        return torch.cat([states_of(model, name, each.input_ids, each.position_ids, each) for each in pieces])


def states_of(
    model: PreTrainedModel,
    backend: str,
    input_ids: Tensor,
    position_ids: Tensor,
    packing: object,
    inputs: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The last hidden states [n, d] of tokens [n] with positions [n] or [rows, n], attention by ``backend``.

    packing: what the back end needs to know of the stream. Raises BackendError if the model went round it.
    """
    before = ran[backend]
    with using(model, backend):
        output = model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(-2),
            packing=packing,
            **(inputs or {}),
        )
    if ran[backend] == before:
        raise BackendError(
            f"{type(model).__name__} never called the attention back end {backend}: its sequences may mix"
        )
    states: Tensor = output.last_hidden_state[0]
    return states


POOLINGS = ("last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean")


def pool(states: Tensor, packed: Packed, pooling: str = "last") -> Tensor:
    """One vector a sequence [n, d], in the caller's order, straight from the stream [T, d].

    pooling: "last" and "cls" gather one token; "max" is per dimension; "mean", "mean_sqrt_len" (the sum
    over the root of the length) and "weighted_mean" (weights 1, 2, 3, ...) are as in sentence-transformers.
    """
    device = states.device
    places = torch.tensor(packed.places, device=device)
    if pooling == "last":
        return states[packed.last_tokens().to(device)]
    if pooling == "cls":
        return states[packed.cu_seqlens[:-1].long().to(device)[places]]
    lengths = torch.tensor(packed.lengths, device=device)
    # Told its size, it need not ask the device.
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=len(states))
    empty = states.new_zeros(len(lengths), states.shape[1])
    if pooling == "max":
        index = owner.unsqueeze(1).expand_as(states)
        return empty.scatter_reduce(0, index, states, "amax", include_self=False)[places]
    if pooling == "weighted_mean":
        weight = torch.arange(1, len(owner) + 1, device=device) - packed.cu_seqlens[:-1].long().to(device)[owner]
        sums = empty.index_add(0, owner, states * weight.unsqueeze(1))
        return sums[places] / (lengths * (lengths + 1) // 2)[places].unsqueeze(1)
    if pooling in ("mean", "mean_sqrt_len"):
        divisor = lengths if pooling == "mean" else lengths.double().sqrt().to(states.dtype)
        return empty.index_add(0, owner, states)[places] / divisor[places].unsqueeze(1)
    raise PackingError(f"no pooling {pooling!r}; there are {', '.join(POOLINGS)}")


def encode(
    model: PreTrainedModel,
    packed: Packed,
    pooling: str = "last",
    backend: str | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """L2-normalised embeddings [n, d] of a packed batch, in the caller's order; differentiable.

    Arguments as in ``hidden_states`` and ``pool``.
    """
    vectors = pool(hidden_states(model, packed, backend, inputs), packed, pooling)
    return torch.nn.functional.normalize(vectors, dim=-1, eps=1e-12)
