"""A real data-parallel step over gloo processes against one process, bit for bit."""

from __future__ import annotations

import pytest

from tests.impl.torchrun import launch

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import impl
from impl import distributed
from impl.losses import InfoNCE
from oracle import exact, reference
from oracle.case import Case, Options, Rows, from_lengths
from oracle.models import tiny
from oracle.outcome import same
from oracle.ranks import loss_scale

torch.set_num_threads(1)
use_batch, averaged = sys.argv[1] == "shared", sys.argv[2] == "right"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
case = from_lengths([[3, 1, 7], [1, 1], [12, 1, 1, 5], [2, 4], [1, 1, 1]], options=Options(use_batch=use_batch))
mine = case.groups[rank : rank + 1] if rank < world - 1 else case.groups[world - 1 :]
share, model = Case(mine, options=case.options), tiny("qwen3")


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, sequences):
        return impl.encode(self.model, impl.pack(sequences))


trainer = DistributedDataParallel(Encoder())
with exact(loss_scale=loss_scale(world)):
    embeddings = trainer(share.sequences)
    labels = torch.tensor(share.labels, dtype=torch.float64)
    loss = distributed.infonce(InfoNCE(use_batch=use_batch), embeddings, labels)
    (loss if averaged else loss / world).backward()
found = {n: p.grad.clone() for n, p in model.named_parameters()}
model.zero_grad()
with exact():
    expected = reference.step(model, case, Rows())
wrong = [n for n in expected.gradients if not same(expected.gradients[n], found[n])]
print(f"rank {rank} loss {same(expected.loss, loss.detach())} gradients {len(found)} wrong {len(wrong)}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind"), [(2, "shared"), (4, "shared"), (2, "own")])
def test_ddps_averaged_gradients_are_one_processs_in_every_bit(world: int, kind: str) -> None:
    assert launch(world, SCRIPT, kind, "right") == [f"rank {r} loss True gradients 24 wrong 0" for r in range(world)]


@pytest.mark.slow
def test_a_gradient_divided_by_the_ranks_is_seen() -> None:
    lines = launch(2, SCRIPT, "shared", "wrong")
    assert all("loss True" in line and "wrong 24" in line for line in lines), lines
