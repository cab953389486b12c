"""ms-swift's sequence parallelism, 4.x: releases before have it for other tasks than embedding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

os.environ.setdefault("USE_HF", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from swift.model.patcher import gather_sequence_parallel_outputs
from swift.sequence_parallel import sequence_parallel
from torch import Tensor


class Shards:
    """Its sequence parallelism, Ulysses and ring: pad, split, and the gathering of outputs as the trainer has it.

    Every rank runs its code in turn in this process; a stand-in for the collective hands each what the others hold.
    """

    name = "ms-swift, sequence parallel"
    __version__ = version("ms-swift")

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        """``pad`` and ``split`` on every rank."""
        positions, rows = _positions(lengths), field.movedim(dim, 0)[None]
        shards = []
        for rank in range(ulysses * ring):
            with _as_rank(rank, ulysses, ring):
                padded = sequence_parallel.pad(rows, padding_value=fill, position_ids=positions)
                slots = sequence_parallel.pad(positions, padding_value=-1, position_ids=positions)
                shards.append(sequence_parallel.split(padded, dim=1, position_ids=slots)[0].movedim(0, dim))
        return shards

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        """``gather_sequence_parallel_outputs`` on every rank, then the rows that its re-padding takes."""
        rows = (shard.movedim(dim, 0)[None] for shard in shards)
        whole: Tensor = _Gathered.apply(tuple(lengths), ulysses, ring, *rows)
        return whole.movedim(0, dim)


class _Gathered(torch.autograd.Function):
    """Every rank gathers the whole; backward, each one's is its own shard's."""

    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, ...], ulysses: int, ring: int, *shards: Tensor) -> Tensor:
        ctx.mesh, ctx.inputs, ctx.outputs = (ulysses, ring), [], []
        for rank, shard in enumerate(shards):
            own = shard.detach().requires_grad_(shard.is_floating_point())
            with torch.enable_grad(), _as_rank(rank, ulysses, ring, shards):
                sequence_parallel.extra_kwargs["text_position_ids"] = _positions(lengths)
                gathered = gather_sequence_parallel_outputs({"last_hidden_state": own})["last_hidden_state"]
                ctx.outputs.append(gathered[0, : sum(lengths)])
            ctx.inputs.append(own)
        return ctx.outputs[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = []
        for rank, (own, output) in enumerate(zip(ctx.inputs, ctx.outputs, strict=True)):
            with _as_rank(rank, *ctx.mesh):
                found += torch.autograd.grad(output, own, gradient, retain_graph=True)
        return None, None, None, *found


def _positions(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


class _OneOfMany(type(sequence_parallel)):
    """Its object, told which rank it is."""

    sp_group, rp_group = "sequence", "ring"

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp_world_size

    @property
    def rp_rank(self) -> int:
        return self.rank // self.sp_world_size


@contextmanager
def _as_rank(rank: int, ulysses: int, ring: int, shards: Sequence[Tensor] = ()) -> Iterator[None]:
    """Its object as one rank of so many, among ranks that hold ``shards``."""
    held = [shard.detach().contiguous() for shard in shards]

    def beside(group: str) -> list[Tensor]:
        chunks = [torch.cat(held[at : at + ulysses], dim=1) for at in range(0, len(held), ulysses)]
        first = rank // ulysses * ulysses
        return held[first : first + ulysses] if group == "sequence" else chunks

    def all_gather(outputs: list[Tensor], own: Tensor, group: str) -> None:
        for output, theirs in zip(outputs, beside(group), strict=True):
            output.copy_(theirs)

    def all_gather_into_tensor(output: Tensor, own: Tensor, group: str) -> None:
        output.copy_(torch.cat(beside(group)))

    sizes = {"rank": rank, "world_size": ulysses * ring, "sp_world_size": ulysses, "rp_world_size": ring}
    before = dict(sequence_parallel.__dict__), type(sequence_parallel)
    sequence_parallel.__class__ = _OneOfMany
    sequence_parallel.__dict__.update(sizes | {"extra_kwargs": {}})
    try:
        with (
            patch.object(torch.distributed, "all_gather", all_gather),
            patch.object(torch.distributed, "all_gather_into_tensor", all_gather_into_tensor),
        ):
            yield
    finally:
        sequence_parallel.__dict__.clear()
        sequence_parallel.__dict__.update(before[0])
        sequence_parallel.__class__ = before[1]
