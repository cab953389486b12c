"""Sequence parallelism: one packed stream over several ranks, by Ulysses, by ring, or by both.

The ranks that share a stream form a ring of ``ring`` times ``ulysses``; rank = ring rank * ulysses + Ulysses
rank. Every sequence is padded to a multiple of 2 ring and cut into as many chunks, of which ring rank r holds
chunks r and 2 ring - 1 - r (zigzag: causal work is even); what a ring rank holds is padded at its tail and cut
into ``ulysses`` equal pieces. Around attention, the Ulysses ranks exchange tokens for heads (Jacobs et al. 2023),
and keys and values go round the ring (Liu et al. 2023). ``Plan`` says where every token is; ranks compute their
real tokens alone, so nothing in a slot can reach anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from impl import attention
from impl.attention import Window
from impl.distributed import for_averaging, infonce, rows_of_all
from impl.encoder import pool
from impl.errors import BackendError, ShardingError
from impl.losses import InfoNCE
from impl.packing import SLOT, Packed

Group = dist.ProcessGroup | None


# Rows of queries, rows of keys, and [rows, cols] booleans: which keys are hidden.
Piece = tuple[slice, slice, Tensor]


# --- where every token is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The index maps of one packed stream over ``ulysses`` x ``ring`` ranks.

    lengths: real tokens of each sequence, in stream order.
    """

    lengths: tuple[int, ...]
    ulysses: int = 1
    ring: int = 1
    _pieces: dict[Any, list[Piece]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.ulysses, self.ring) < 1:
            raise ShardingError(f"sizes must be at least 1, found Ulysses {self.ulysses} and ring {self.ring}")
        if not self.lengths:
            raise ShardingError("the batch is empty: there is nothing to share")
        for i, length in enumerate(self.lengths):
            if length < 1:
                raise ShardingError(f"sequence {i} has {length} tokens; an empty sequence has no embedding")

    @property
    def ranks(self) -> int:
        """How many share the stream."""
        return self.ulysses * self.ring

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor]:
        """The padded stream as stream indices (-1: a slot), and each slot's ring rank."""
        lengths = torch.tensor(self.lengths)
        multiple = 2 * self.ring if self.ring > 1 else 1
        chunk = -(-lengths // multiple)
        padded = chunk * multiple
        owner = torch.repeat_interleave(torch.arange(len(lengths)), padded)
        within = torch.arange(int(padded.sum())) - (padded.cumsum(0) - padded)[owner]
        starts = lengths.cumsum(0) - lengths
        tokens = torch.where(within < lengths[owner], starts[owner] + within, SLOT)
        piece = within // chunk[owner]
        rank = torch.minimum(piece, multiple - 1 - piece) if self.ring > 1 else torch.zeros_like(piece)
        tail = -len(tokens) % self.ranks
        rank_of_tail = torch.arange(tail) // max(1, tail // self.ring)
        return torch.cat([tokens, torch.full((tail,), SLOT)]), torch.cat([rank, rank_of_tail])

    @property
    def padded(self) -> Tensor:
        """int64 [P]: the stream with its slots, as indices into the stream without; -1 is a slot."""
        return self._layout[0]

    @cached_property
    def shards(self) -> Tensor:
        """int64 [ranks, P / ranks]: what each rank holds, as indices into the padded stream."""
        return self._layout[1].argsort(stable=True).view(self.ranks, -1)

    @cached_property
    def tokens(self) -> list[Tensor]:
        """The real tokens of each rank, as indices into the stream, in the rank's order."""
        return [held[held >= 0] for held in self.padded[self.shards]]

    @cached_property
    def counts(self) -> list[int]:
        """How many real tokens each rank holds; 0 where it holds slots only."""
        return [len(held) for held in self.tokens]

    @cached_property
    def _home(self) -> Tensor:
        """For every token of the stream, its place among all ranks' real tokens one after another."""
        return torch.cat(self.tokens).argsort()

    def position(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence, and place within it, of tokens given by stream index."""
        ends = torch.tensor((0, *self.lengths)).cumsum(0)
        sequence = torch.searchsorted(ends, tokens, right=True) - 1
        return sequence, tokens - ends[sequence]

    @cached_property
    def on_ring(self) -> list[tuple[Tensor, Tensor]]:
        """Sequence and place within it of each ring rank's real tokens, its Ulysses ranks' one after another."""
        size = self.ulysses
        held = [torch.cat(self.tokens[ring * size : (ring + 1) * size]) for ring in range(self.ring)]
        return [self.position(tokens) for tokens in held]

    def pieces(self, mine: int, source: int, window: Window, device: torch.device) -> list[Piece]:
        """Queries of ring rank ``mine``, keys of ring rank ``source``, and which of these those may not see: the
        same for all layers of a model."""
        if (mine, source, window, device) not in self._pieces:
            (q_seq, q_at), (k_seq, k_at) = self.on_ring[mine], self.on_ring[source]
            cuts = torch.tensor(_cuts(self.lengths))
            rows, cols = (torch.searchsorted(seq, cuts).tolist() for seq in (q_seq, k_seq))
            left, right = window
            found = []
            for q0, q1, k0, k1 in zip(rows[:-1], rows[1:], cols[:-1], cols[1:], strict=True):
                if q0 == q1 or k0 == k1:
                    continue
                offset = k_at[k0:k1][None, :] - q_at[q0:q1][:, None]
                seen = q_seq[q0:q1][:, None] == k_seq[k0:k1][None, :]
                seen = seen & (offset >= -left) if left >= 0 else seen
                seen = seen & (offset <= right) if right >= 0 else seen
                if seen.any():
                    found.append((slice(q0, q1), slice(k0, k1), ~seen.to(device)))
            self._pieces[mine, source, window, device] = found
        return self._pieces[mine, source, window, device]

    def split(self, values: Tensor, dim: int = 0, fill: float = 0) -> list[Tensor]:
        """What each rank holds of per-token values [..., T, ...], slots filled: [..., P / ranks, ...] each.

        Every field of a batch (ids, all rows of position ids, masks, embeddings) is cut by this one map.
        """
        if values.shape[dim] != sum(self.lengths):
            raise ShardingError(f"{values.shape[dim]} values for a stream of {sum(self.lengths)} tokens")
        return [self._held(values, self.padded[held], dim, fill) for held in self.shards]

    @staticmethod
    def _held(values: Tensor, tokens: Tensor, dim: int, fill: float) -> Tensor:
        shape = [-1 if d == dim % values.dim() else 1 for d in range(values.dim())]
        slots = (tokens < 0).view(shape).to(values.device)
        taken = values.index_select(dim, tokens.clamp(min=0).to(values.device))
        return torch.where(slots, torch.as_tensor(fill, dtype=values.dtype, device=values.device), taken)

    def gather(self, shards: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The inverse of ``split``: [..., T, ...] without slots. What a slot holds, NaN too, is never touched."""
        wrong = [r for r, shard in enumerate(shards) if shard.shape[dim] != self.shards.shape[1]]
        if len(shards) != self.ranks or wrong:
            sizes = [shard.shape[dim] for shard in shards]
            raise ShardingError(f"shards of {sizes}, expected {self.ranks} of {self.shards.shape[1]}")
        place = self.shards.flatten().argsort()[self.padded >= 0]
        return torch.cat(list(shards), dim).index_select(dim, place.to(shards[0].device))

    def collected(self, pieces: Sequence[Tensor]) -> Tensor:
        """The stream's values [T, ...] from every rank's real tokens' [counts[rank], ...]."""
        return torch.cat(list(pieces))[self._home.to(pieces[0].device)]


# Tokens whose scores are computed at once: whole sequences until there are so many, a longer one alone.
PIECE = 256


def _cuts(lengths: Sequence[int]) -> list[int]:
    """Where to cut the sequences into pieces of about PIECE tokens: indices from 0 to their number."""
    ends, taken = [0], 0
    for i, length in enumerate(lengths):
        if taken and taken + length > PIECE:
            ends.append(i)
            taken = 0
        taken += length
    return [*ends, len(lengths)]


# --- how tensors get from rank to rank --------------------------------------------------------------

Pieces = list[list[Tensor]]


class Wire(Protocol):
    """Moves tensors between the ranks that share a stream.

    held: the ranks whose tensors are here: one in a process of its own, all of them in a simulation. The
    methods take and give one entry for each of these.
    """

    @property
    def plan(self) -> Plan:
        """The stream's."""
        ...

    @property
    def held(self) -> Sequence[int]:
        """See above."""
        ...

    def exchange(self, sent: Pieces, shapes: list[list[tuple[int, ...]]]) -> Pieces:
        """All-to-all among Ulysses ranks: entry [i][j] goes to the j-th of them; differentiable.

        shapes: of what comes from each.
        """
        ...

    def shift(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Each ring rank's tensor to the next ring rank; what came from the one before. Not differentiable."""
        ...


@dataclass(frozen=True)
class Simulated:
    """All ranks in one process: the same maps and arithmetic as in processes, no torch.distributed."""

    plan: Plan

    @property
    def held(self) -> Sequence[int]:
        """Every rank."""
        return range(self.plan.ranks)

    def exchange(self, sent: Pieces, shapes: list[list[tuple[int, ...]]]) -> Pieces:
        """See ``Wire``."""
        size = self.plan.ulysses
        got = [[sent[rank // size * size + peer][rank % size] for peer in range(size)] for rank in self.held]
        return [self._as_expected(pieces, wanted) for pieces, wanted in zip(got, shapes, strict=True)]

    def shift(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """See ``Wire``."""
        return self._as_expected([sent[(rank - self.plan.ulysses) % self.plan.ranks] for rank in self.held], shapes)

    @staticmethod
    def _as_expected(got: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Between processes a piece of another size than expected would be read wrongly, or never arrive."""
        if [tuple(each.shape) for each in got] != shapes:
            raise ShardingError(f"pieces of {[tuple(each.shape) for each in got]} arrived, expected {shapes}")
        return got


@dataclass(frozen=True)
class Ranks:
    """The process groups of this rank.

    ulysses, ring: the ranks it exchanges heads with, and those its keys and values go round. sequence: all
    that share its stream. data: one rank of every stream, in the same place.
    """

    ulysses: Group
    ring: Group
    sequence: Group
    data: Group

    @classmethod
    def over(cls, ulysses: int = 1, ring: int = 1, device: str = "cpu") -> Ranks:
        """The default group's ranks as streams x ring x Ulysses. Every rank must call it.

        Raises ShardingError where the sizes do not divide the number of ranks.
        """
        world = dist.get_world_size()
        if min(ulysses, ring) < 1 or world % (ulysses * ring):
            raise ShardingError(f"{world} ranks are no multiple of Ulysses {ulysses} x ring {ring}")
        names = ("data", "ring", "ulysses")
        mesh = init_device_mesh(device, (world // (ulysses * ring), ring, ulysses), mesh_dim_names=names)
        sequence = mesh["ring", "ulysses"]._flatten("sequence").get_group()
        return cls(mesh.get_group("ulysses"), mesh.get_group("ring"), sequence, mesh.get_group("data"))

    def wire(self, lengths: Sequence[int]) -> Processes:
        """For one packed stream."""
        return Processes(self, Plan(tuple(lengths), dist.get_world_size(self.ulysses), dist.get_world_size(self.ring)))


@dataclass(frozen=True)
class Processes:
    """One rank in a process of its own, over torch.distributed."""

    ranks: Ranks
    plan: Plan

    @property
    def rank(self) -> int:
        """Among those that share the stream."""
        return dist.get_rank(self.ranks.ring) * self.plan.ulysses + dist.get_rank(self.ranks.ulysses)

    @property
    def held(self) -> Sequence[int]:
        """The rank here alone."""
        return [self.rank]

    def exchange(self, sent: Pieces, shapes: list[list[tuple[int, ...]]]) -> Pieces:
        """See ``Wire``."""
        (pieces,), (wanted,) = sent, shapes
        sizes = [torch.Size(shape).numel() for shape in wanted]
        flat = torch.cat([piece.flatten() for piece in pieces])
        got = _AllToAll.apply(flat, [piece.numel() for piece in pieces], sizes, self.ranks.ulysses)
        return [[part.view(shape) for part, shape in zip(got.split(sizes), wanted, strict=True)]]

    def shift(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """See ``Wire``."""
        group, size, me = self.ranks.ring, self.plan.ring, dist.get_rank(self.ranks.ring)
        mine, got = sent[0].contiguous(), sent[0].new_empty(shapes[0])
        work = []
        if mine.numel():
            work.append(dist.P2POp(dist.isend, mine, group=group, group_peer=(me + 1) % size))
        if got.numel():
            work.append(dist.P2POp(dist.irecv, got, group=group, group_peer=(me - 1) % size))
        for each in dist.batch_isend_irecv(work) if work else []:
            each.wait()
        return [got]

    def own(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """All ranks' rows one after another from this rank's x [counts[rank], ...], which keeps its gradient."""
        return rows_of_all(x, list(counts), self.ranks.sequence)


class _AllToAll(torch.autograd.Function):
    """Pieces of a vector to every rank; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        out = x.new_empty(sum(got))
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = gradients[0].new_empty(sum(ctx.sent))
        dist.all_to_all_single(back, gradients[0].contiguous(), ctx.sent, ctx.got, group=ctx.group)
        return back, None, None, None


# --- attention over shards --------------------------------------------------------------------------


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


# --- a model on this rank's shard -------------------------------------------------------------------


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
    before = attention.ran["sharded"]
    with attention.using(model, "sharded"):
        output = model(
            input_ids=packed.input_ids[rows].unsqueeze(0),
            position_ids=packed.position_ids[..., rows].unsqueeze(-2),
            packing=_Shard(wire, len(mine), streaming),
        )
    if attention.ran["sharded"] == before:
        raise BackendError(f"{type(model).__name__} never called the attention back end sharded: shards cannot meet")
    states: Tensor = output.last_hidden_state[0]
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
    other = [rank for rank, each in enumerate(theirs) if int(each) != int(theirs[0])]
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
        whole = wire.own(states, plan.counts)[plan._home.to(states.device)]
        vectors = pool(whole, packed, pooling)
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
