"""A real data-parallel step over gloo processes against one process, bit for bit."""

from __future__ import annotations

import pytest

from tests.impl.torchrun import launch

SCRIPT = """
import torch
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
dist.init_process_group("gloo")
rank, world, wrong, halved, losses = dist.get_rank(), dist.get_world_size(), 0, 0, 0


class Encoder(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, sequences):
        return impl.encode(self.model, impl.pack(sequences))


for use_batch, averaged in [(True, True), (False, True), (True, False)]:
    case = from_lengths([[3, 1, 7], [1, 1], [12, 1, 1, 5], [2, 4], [1, 1, 1]], options=Options(use_batch=use_batch))
    mine = case.groups[rank : rank + 1] if rank < world - 1 else case.groups[world - 1 :]
    share, model = Case(mine, options=case.options), tiny("qwen3")
    trainer = DistributedDataParallel(Encoder(model))
    with exact(loss_scale=loss_scale(world)):
        embeddings = trainer(share.sequences)
        labels = torch.tensor(share.labels, dtype=torch.float64)
        loss = distributed.infonce(InfoNCE(use_batch=use_batch), embeddings, labels)
        (loss if averaged else loss / world).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with exact():
        expected = reference.step(model, case, Rows())
    differ = sum(not same(expected.gradients[n], found[n]) for n in expected.gradients)
    losses += same(expected.loss, loss.detach())
    if averaged:
        wrong += differ
    else:
        halved = differ
print(f"rank {rank} losses {losses} divided by ranks {halved} of {len(found)} differ, else wrong {wrong}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ddps_averaged_gradients_are_one_processs_in_every_bit(world: int) -> None:
    """With and without the rest of the batch; a gradient divided by the ranks is seen in every parameter."""
    expected = "losses 3 divided by ranks 24 of 24 differ, else wrong 0"
    assert launch(world, SCRIPT) == [f"rank {rank} {expected}" for rank in range(world)]
