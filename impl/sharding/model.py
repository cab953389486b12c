"""A model on one rank's shard: hidden states, embeddings, and the loss for a trainer that averages gradients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from impl import attention
from impl.attention import Window
from impl.distributed import for_averaging, infonce
from impl.encoder import pool, states_of
from impl.errors import BackendError, ShardingError
from impl.losses import InfoNCE
from impl.packing import Packed
from impl.sharding.ring import sharded_attention
from impl.sharding.wire import Processes, Ranks


@dataclass(frozen=True)
class _Shard:
    """What attention needs to know: the wire, and how many of the rows here are real tokens."""

    wire: Processes
    count: int
    streaming: bool


def _backend(q: Tensor, k: Tensor, v: Tensor, shard: Any, window: Window, scale: float) -> Tensor:
    """The back end ``sharded``: q [rows, h, d]; rows beyond the real tokens (one slot, or none) give zeros."""
    if not isinstance(shard, _Shard):
        raise BackendError("the back end sharded needs to know its ranks: call impl.sharding.encode()")
    real = q[: shard.count], k[: shard.count], v[: shard.count]
    (out,) = sharded_attention(shard.wire, [real], window, scale, shard.streaming)
    return torch.cat([out, torch.zeros_like(q[shard.count :])])


attention.register("sharded", _backend)


def hidden_states(model: PreTrainedModel, packed: Packed, wire: Processes, streaming: bool = True) -> Tensor:
    """The last hidden states [n, d] of this rank's real tokens, ``wire.plan.tokens[rank]`` of the stream.

    Every rank of the sequence group must call it, and run backward, at the same time with the same ``packed``.

    Raises:
        ShardingError: ranks that share the batch were given different ones; a batch with images.
    """
    _check(model, packed, wire)
    mine = wire.plan.tokens[wire.rank]
    rows = mine if len(mine) else torch.zeros(1, dtype=torch.int64)  # a model wants a row; nothing sees it
    packed, rows = packed.to(model.device), rows.to(model.device)
    shard = _Shard(wire, len(mine), streaming)
    states = states_of(model, "sharded", packed.input_ids[rows], packed.position_ids[..., rows], shard)
    return states[: len(mine)]


def _check(model: PreTrainedModel, packed: Packed, wire: Processes) -> None:
    image = getattr(model.config, "image_token_id", None)
    if image is not None and bool((packed.input_ids == image).any()):
        raise ShardingError("the batch holds images, which are not shared out over ranks: texts alone are")
    ids = hashlib.blake2b(packed.input_ids.cpu().numpy().tobytes(), digest_size=8)
    ids.update(packed.position_ids.cpu().contiguous().numpy().tobytes() + str(packed.lengths).encode())
    mine = torch.tensor([int.from_bytes(ids.digest(), signed=True)], device=model.device)
    theirs = [torch.empty_like(mine) for _ in range(wire.plan.ranks)]
    dist.all_gather(theirs, mine, group=wire.ranks.sequence)
    told = torch.cat(theirs).tolist()
    other = [rank for rank, each in enumerate(told) if each != told[0]]
    if other:
        raise ShardingError(f"ranks {other} of those that share a batch were given another one than rank 0")


def encode(
    model: PreTrainedModel, packed: Packed, ranks: Ranks, pooling: str = "last", streaming: bool = True
) -> Tensor:
    """L2-normalised embeddings [n, d] of the whole packed batch on every rank that shares it, in the caller's order.

    Each rank carries the gradient of the tokens it holds: hand the loss to ``for_averaging``, or use ``loss``.

    With gradient checkpointing call ``impl.attention.install(model, "sharded")`` once.

    Args:
        packed: the same on all ranks of the sequence group.
        streaming: one round of the ring with a running log-sum-exp, or three with exact merges.
    """
    wire = ranks.wire(packed.lengths)
    states, plan = hidden_states(model, packed, wire, streaming), wire.plan
    if pooling not in ("last", "cls"):
        vectors = pool(plan.collected([wire.own(states, plan.counts)]), packed, pooling)
    else:
        ends = packed.cu_seqlens.long().cpu()
        wanted = ends[1:] - 1 if pooling == "last" else ends[:-1]
        local = [torch.isin(held, wanted).nonzero().flatten() for held in plan.tokens]
        rows = wire.own(states[local[wire.rank].to(states.device)], [len(each) for each in local])
        found = torch.cat([held[at] for held, at in zip(plan.tokens, local, strict=True)])
        order = found.argsort()[torch.tensor(packed.places)]  # stream places, then the caller's order
        vectors = rows[order.to(rows.device)]
    return torch.nn.functional.normalize(vectors, dim=-1, eps=1e-12)


def loss(infonce_loss: InfoNCE, embeddings: Tensor, labels: Tensor, ranks: Ranks) -> Tensor:
    """InfoNCE over all streams' groups; after averaging over ALL ranks the gradient is the whole batch's.

    The ranks that share a stream each carry a part of the gradient, which averaging would divide by their
    number: the loss's gradient is multiplied by it. The value is the same on every rank.
    """
    return for_averaging(infonce(infonce_loss, embeddings, labels, ranks.data), ranks.sequence)
