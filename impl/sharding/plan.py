"""Where every token of a packed stream is: the index maps, as integers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from impl.attention import Window
from impl.errors import ShardingError
from impl.packing import SLOT

# Rows of queries, rows of keys, and [rows, cols] booleans: which keys are hidden.
Piece = tuple[slice, slice, Tensor]


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
        return taken.masked_fill(slots, fill)

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
