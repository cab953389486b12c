"""Attention over shards: heads for tokens among Ulysses ranks, keys and values round a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from impl.attention import Window
from impl.errors import ShardingError
from impl.sharding.wire import Wire


@dataclass(frozen=True)
class _Meeting:
    """Some queries of a held rank and the keys of the same sequences in a block.

    i: which of the held ranks. rows, cols: where in its queries, and in the block. scores [kv heads, queries
    a head, rows, cols], -inf where hidden. k, v: [kv heads, 1, cols, d].
    """

    i: int
    rows: slice
    cols: slice
    scores: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _Blocks:
    """The blocks of keys and values that come round each held rank's ring, and who may see what in them."""

    wire: Wire
    window: Window
    scale: float

    def ring_rank(self, rank: int) -> int:
        return rank // self.wire.plan.ulysses

    def meetings(
        self, qs: list[Tensor], kvs: list[Tensor], gradients: list[Tensor] | None = None
    ) -> Iterator[_Meeting]:
        """One round: each held rank's queries [kv heads, queries a head, N, d] with every block [M, 2, kv heads,
        d]. ``gradients`` travel with the blocks, and are home again at the end."""
        plan = self.wire.plan
        for step in range(plan.ring):
            kvs = self._shifted(kvs, step) if step else kvs
            for i, rank in enumerate(self.wire.held):
                mine = self.ring_rank(rank)
                for rows, cols, hidden in plan.pieces(mine, (mine - step) % plan.ring, self.window, qs[i].device):
                    k, v = _wide(kvs[i][cols]).permute(1, 2, 0, 3).unsqueeze(2)
                    scores = torch.matmul(qs[i][..., rows, :], k.transpose(-1, -2)) * self.scale
                    yield _Meeting(i, rows, cols, scores.masked_fill(hidden, -torch.inf), k, v)
            if gradients is not None:
                gradients[:] = self._shifted(gradients, step + 1)

    def _shifted(self, blocks: list[Tensor], step: int) -> list[Tensor]:
        """What comes from the rank before, in the given step."""
        plan = self.wire.plan
        if plan.ring == 1:
            return blocks
        sizes = [len(plan.on_ring[(self.ring_rank(rank) - step) % plan.ring][0]) for rank in self.wire.held]
        return self.wire.shift(blocks, [(n, *b.shape[1:]) for n, b in zip(sizes, blocks, strict=True)])


def _wide(x: Tensor) -> Tensor:
    """Half precision as float32: sums over many blocks want more bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """[N, heads, d] -> [kv heads, heads / kv heads, N, d]."""
    return _wide(x).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``_by_head``."""
    return x.permute(2, 0, 1, 3).flatten(1, 2).to(dtype)


class _Ring(torch.autograd.Function):
    """Attention of each held rank's queries [N, h, d] to all ranks' keys and values, which go round a ring.

    ``streaming``: one round, with a running log-sum-exp. Without: a round for the maximum, one for the sum, one
    for the output, so that sums over blocks merge by addition alone; in exact arithmetic it has the bits of
    attention in one piece.
    """

    @staticmethod
    def forward(ctx: Any, blocks: _Blocks, streaming: bool, *qkv: Tensor) -> tuple[Tensor, ...]:
        held = len(blocks.wire.held)
        heads = qkv[held].shape[1]
        qs = [_by_head(q, heads) for q in qkv[:held]]
        kvs = [torch.stack([k, v], dim=1) for k, v in zip(qkv[held : 2 * held], qkv[2 * held :], strict=True)]
        outs, tops, totals = (_one_round if streaming else _three_rounds)(blocks, qs, kvs)
        ctx.blocks, ctx.streaming, ctx.held = blocks, streaming, held
        ctx.save_for_backward(*qs, *kvs, *outs, *tops, *totals)
        return tuple(_by_token(out, qkv[0].dtype) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        qs, kvs, outs, tops, totals = (list(saved[i * ctx.held : (i + 1) * ctx.held]) for i in range(5))
        blocks, dtype = ctx.blocks, kvs[0].dtype
        gs = [_by_head(g, kvs[0].shape[2]) for g in gradients]

        def weights(met: _Meeting) -> Tensor:
            top, total = (x[met.i][..., met.rows, :] for x in (tops, totals))
            if ctx.streaming:
                return (met.scores - (top + total.log())).exp()
            return (met.scores - top).exp() / total

        if ctx.streaming:
            means = [(g * out).sum(-1, keepdim=True) for g, out in zip(gs, outs, strict=True)]
        else:  # the same sum, from the weights, as softmax's own gradient takes it
            means = [torch.zeros_like(total) for total in totals]
            for met in blocks.meetings(qs, kvs):
                upstream = torch.matmul(gs[met.i][..., met.rows, :], met.v.transpose(-1, -2))
                means[met.i][..., met.rows, :] += (weights(met) * upstream).sum(-1, keepdim=True)
        dqs = [torch.zeros_like(q) for q in qs]
        dkvs = [torch.zeros_like(_wide(kv)) for kv in kvs]
        for met in blocks.meetings(qs, kvs, dkvs):
            q, g, mean = (x[met.i][..., met.rows, :] for x in (qs, gs, means))
            p = weights(met)
            ds = p * (torch.matmul(g, met.v.transpose(-1, -2)) - mean) * blocks.scale
            dqs[met.i][..., met.rows, :] += torch.matmul(ds, met.k)
            dk = torch.matmul(ds.transpose(-1, -2), q).sum(1)
            dv = torch.matmul(p.transpose(-1, -2), g).sum(1)
            dkvs[met.i][met.cols] += torch.stack([dk, dv]).permute(2, 0, 1, 3)
        dks, dvs = ([dkv[:, part].to(dtype) for dkv in dkvs] for part in (0, 1))
        return None, None, *(_by_token(dq, dtype) for dq in dqs), *dks, *dvs


Results = tuple[list[Tensor], list[Tensor], list[Tensor]]


def _three_rounds(blocks: _Blocks, qs: list[Tensor], kvs: list[Tensor]) -> Results:
    """Outputs, row maxima and sums of exponentials."""
    tops = [q.new_full((*q.shape[:-1], 1), -torch.inf) for q in qs]
    for met in blocks.meetings(qs, kvs):
        top = tops[met.i][..., met.rows, :]
        top.copy_(torch.maximum(top, met.scores.amax(-1, keepdim=True)))
    totals = [torch.zeros_like(top) for top in tops]
    for met in blocks.meetings(qs, kvs):
        top = tops[met.i][..., met.rows, :]
        totals[met.i][..., met.rows, :] += (met.scores - top).exp().sum(-1, keepdim=True)
    outs = [torch.zeros_like(q) for q in qs]
    for met in blocks.meetings(qs, kvs):
        top, total = (x[met.i][..., met.rows, :] for x in (tops, totals))
        outs[met.i][..., met.rows, :] += torch.matmul((met.scores - top).exp() / total, met.v)
    return outs, tops, totals


def _one_round(blocks: _Blocks, qs: list[Tensor], kvs: list[Tensor]) -> Results:
    """The same with sums against a running maximum, scaled whenever it rises."""
    tops = [q.new_full((*q.shape[:-1], 1), -torch.inf) for q in qs]
    totals = [torch.zeros_like(top) for top in tops]
    outs = [torch.zeros_like(q) for q in qs]
    for met in blocks.meetings(qs, kvs):
        top, total, out = (x[met.i][..., met.rows, :] for x in (tops, totals, outs))
        risen = torch.maximum(top, met.scores.amax(-1, keepdim=True))
        against = risen.masked_fill(risen.isinf(), 0.0)  # a row that has seen nothing yet
        p, faded = (met.scores - against).exp(), (top - against).exp()
        total.copy_(total * faded + p.sum(-1, keepdim=True))
        out.copy_(out * faded + torch.matmul(p, met.v))
        top.copy_(risen)
    return [out / total for out, total in zip(outs, totals, strict=True)], tops, totals


def sharded_attention(
    wire: Wire, qkv: Sequence[tuple[Tensor, Tensor, Tensor]], window: Window, scale: float, streaming: bool = True
) -> list[Tensor]:
    """Attention over shards: q [n, h, d], k and v [n, h_kv, d] of each held rank's real tokens -> [n, h, d] each.

    Args:
        window: keys to the left and right that a query sees, -1: no limit; causal: (-1, 0).
        streaming: see ``_Ring``.

    Raises:
        ShardingError: heads that do not divide by the Ulysses size.
    """
    plan, size = wire.plan, wire.plan.ulysses
    heads, kv_heads, width = qkv[0][0].shape[1], qkv[0][1].shape[1], qkv[0][0].shape[2]
    if heads % size or kv_heads % size:
        raise ShardingError(f"{heads} heads and {kv_heads} key-value heads do not divide by Ulysses {size}")
    shares = (heads // size, kv_heads // size, kv_heads // size)
    sent = [
        [torch.cat([x.split(share, 1)[peer] for x, share in zip(each, shares, strict=True)], 1) for peer in range(size)]
        for each in qkv
    ]
    peers = [range(rank // size * size, (rank // size + 1) * size) for rank in wire.held]
    shapes: list[list[tuple[int, ...]]] = [[(plan.counts[p], sum(shares), width) for p in own] for own in peers]
    got = [torch.cat(pieces).split(shares, 1) for pieces in wire.exchange(sent, shapes)]
    blocks = _Blocks(wire, window, scale)
    outs = _Ring.apply(blocks, streaming, *(g[0] for g in got), *(g[1] for g in got), *(g[2] for g in got))
    back = [list(out.split([plan.counts[p] for p in own])) for out, own in zip(outs, peers, strict=True)]
    shapes = [[(plan.counts[rank], shares[0], width)] * size for rank in wire.held]
    return [torch.cat(pieces, 1) for pieces in wire.exchange(back, shapes)]
