"""How tensors get from rank to rank: over torch.distributed, or all in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh

from impl.distributed import rows_of_all
from impl.errors import ShardingError
from impl.sharding.plan import Plan

Group = dist.ProcessGroup | None
Parcels = list[list[Tensor]]


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

    def exchange(self, sent: Parcels, shapes: list[list[tuple[int, ...]]]) -> Parcels:
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

    def exchange(self, sent: Parcels, shapes: list[list[tuple[int, ...]]]) -> Parcels:
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

    def exchange(self, sent: Parcels, shapes: list[list[tuple[int, ...]]]) -> Parcels:
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
    """Parcels of a vector to every rank; their gradients come back the same way."""

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
