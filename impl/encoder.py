"""Any Hugging Face text model on a packed stream: pooled, normalised embeddings."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl.attention import choose, ran, using
from impl.errors import BackendError, PackingError
from impl.packing import Packed


def hidden_states(model: PreTrainedModel, packed: Packed, backend: str | None = None) -> Tensor:
    """The last hidden states [T, d] of the stream, each token seeing its own sequence only.

    Args:
        model: a decoder or encoder whose attention goes through transformers' AttentionInterface.
        packed: on any device; moved to the model's.
        backend: "sdpa", "varlen" or "flash_attn"; None chooses by device and dtype.

    Raises:
        BackendError: the back end is unknown, cannot run here, or the model went round it.
    """
    packed = packed.to(model.device)
    name = backend or choose(model.device, model.dtype)
    before = ran[name]
    with using(model, name):
        output = model(
            input_ids=packed.input_ids.unsqueeze(0),
            position_ids=packed.position_ids.unsqueeze(0),
            packing=packed,
        )
    if ran[name] == before:
        raise BackendError(f"{type(model).__name__} never called the attention back end {name}: its sequences may mix")
    states: Tensor = output.last_hidden_state[0]
    return states


def pool(states: Tensor, packed: Packed, pooling: str = "last") -> Tensor:
    """One vector a sequence [n, d], in the caller's order, straight from the stream [T, d]."""
    if pooling == "last":
        return states[packed.last_tokens().to(states.device)]
    if pooling == "mean":
        lengths = torch.tensor(packed.lengths, device=states.device)
        owner = torch.repeat_interleave(torch.tensor(packed.order, device=states.device), lengths)
        sums = states.new_zeros(len(packed.lengths), states.shape[1]).index_add(0, owner, states)
        return sums / lengths[torch.tensor(packed.places, device=states.device)].unsqueeze(1)
    raise PackingError(f"no pooling {pooling!r}; there are last and mean")


def encode(model: PreTrainedModel, packed: Packed, pooling: str = "last", backend: str | None = None) -> Tensor:
    """L2-normalised embeddings [n, d] of a packed batch, in the caller's order; differentiable."""
    vectors = pool(hidden_states(model, packed, backend), packed, pooling)
    return torch.nn.functional.normalize(vectors, dim=-1, eps=1e-12)
