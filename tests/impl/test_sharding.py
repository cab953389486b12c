"""Shards: the index maps against plain loops, the simulator against real processes, and a real trainer over both."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl import pack, sharding
from impl.errors import ShardingError
from impl.sharding import Plan, Simulated, sharded_attention
from tests.impl.torchrun import ROOT, launch, run

SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (3, 2), (2, 3)]


def held_by_definition(lengths: list[int], ulysses: int, ring: int) -> list[list[int]]:
    """What each rank holds, -1 a slot, by plain loops."""
    on_ring: list[list[int]] = [[] for _ in range(ring)]
    start = 0
    for length in lengths:
        tokens = list(range(start, start + length))
        start += length
        while ring > 1 and len(tokens) % (2 * ring):
            tokens.append(-1)
        if ring == 1:
            on_ring[0] += tokens
            continue
        size = len(tokens) // (2 * ring)
        chunks = [tokens[i * size : (i + 1) * size] for i in range(2 * ring)]
        for rank in range(ring):
            on_ring[rank] += chunks[rank] + chunks[2 * ring - 1 - rank]
    held = []
    for tokens in on_ring:
        while len(tokens) % ulysses:
            tokens.append(-1)
        size = len(tokens) // ulysses
        held += [tokens[u * size : (u + 1) * size] for u in range(ulysses)]
    return held


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.sampled_from(SIZES))
def test_the_plan_is_the_definition(lengths: list[int], sizes: tuple[int, int]) -> None:
    plan = Plan(tuple(lengths), *sizes)
    held = held_by_definition(lengths, *sizes)
    assert plan.padded[plan.shards].tolist() == held
    assert [each.tolist() for each in plan.tokens] == [[t for t in each if t >= 0] for each in held]
    assert plan.counts == [sum(t >= 0 for t in each) for each in held]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    sequence, at = plan.position(torch.arange(sum(lengths)))
    assert [starts[s] + p for s, p in zip(sequence.tolist(), at.tolist(), strict=True)] == list(range(sum(lengths)))


def test_second_derivatives_are_refused_rather_than_wrong() -> None:
    wire = Simulated(Plan((3, 2), 2, 2))
    leaves = [torch.ones(n, 2, 4, dtype=torch.float64).requires_grad_() for n in wire.plan.counts]
    out = torch.cat(sharded_attention(wire, [(x, x, x) for x in leaves], (-1, 0), 1.0))
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.cat(first).sum().backward()


def test_layers_share_who_may_see_what() -> None:
    plan = Plan((3, 2, 4), 1, 2)
    assert plan.pieces(0, 1, (-1, 0), torch.device("cpu")) is plan.pieces(0, 1, (-1, 0), torch.device("cpu"))
    assert plan.pieces(0, 1, (-1, 0), torch.device("cpu")) is not plan.pieces(0, 1, (2, 0), torch.device("cpu"))


def test_shares_by_hand_along_any_dimension() -> None:
    """Ring 2: of 3 tokens rank 0 holds the first and a slot, rank 1 the two between."""
    plan, values = Plan((3,), 1, 2), torch.tensor([5, 6, 7])
    assert [each.tolist() for each in plan.split(values)] == [[5, 0], [6, 7]]
    assert [each.tolist() for each in plan.split(values, fill=9)] == [[5, 9], [6, 7]]
    assert all(each.dtype == torch.int64 for each in plan.split(values))
    low = plan.split(values.bfloat16(), fill=float("nan"))
    assert low[0].isnan().tolist() == [False, True]
    assert all(each.dtype == torch.bfloat16 for each in low)
    grid = torch.stack([values, values + 10])
    shares = plan.split(grid, dim=1, fill=-1)
    assert [each.tolist() for each in shares] == [[[5, -1], [15, -1]], [[6, 7], [16, 17]]]
    assert torch.equal(plan.gather(shares, dim=1), grid)
    assert torch.equal(plan.gather(plan.split(values)), values)
    assert torch.equal(Plan((3,)).gather(Plan((3,)).split(values)), values)
    assert torch.equal(Plan((3,)).collected([values]), values)
    assert torch.equal(plan.collected([values[held] for held in plan.tokens]), values)


def test_a_rank_may_hold_slots_only() -> None:
    assert Plan((1,), 4, 1).counts == [1, 0, 0, 0]
    assert Plan((1, 1), 1, 2).counts == [2, 0]
    assert Plan((1,), 2, 2).padded[Plan((1,), 2, 2).shards].tolist() == [[0], [-1], [-1], [-1]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Plan(()), "^the batch is empty: there is nothing to share$"),
        (lambda: Plan((3, 0, 2)), "sequence 1 has 0 tokens"),
        (lambda: Plan((3,), 0), "sizes must be at least 1, found Ulysses 0"),
        (lambda: Plan((3,), 2).split(torch.zeros(4)), "4 values for a stream of 3 tokens"),
        (lambda: Plan((3,), 2).gather([torch.zeros(2)]), r"shards of \[2\], expected 2 of 2"),
        (lambda: Plan((3,), 2).gather([torch.zeros(2), torch.zeros(1)]), r"shards of \[2, 1\], expected 2 of 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        build()


def test_heads_that_do_not_divide_are_refused() -> None:
    wire = Simulated(Plan((3, 2), 4, 1))
    qkv = [(torch.zeros(n, 4, 8), torch.zeros(n, 2, 8), torch.zeros(n, 2, 8)) for n in wire.plan.counts]
    with pytest.raises(ShardingError, match="4 heads and 2 key-value heads do not divide by Ulysses 4"):
        sharded_attention(wire, qkv, (-1, 0), 1.0)


WINDOWS = [(-1, 0), (-1, -1), (2, 0), (1, 2), (0, 0), (0, 1)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from(SIZES), st.sampled_from(WINDOWS))
def test_every_query_sees_its_own_sequence_within_its_window(
    lengths: list[int], sizes: tuple[int, int], window: tuple[int, int]
) -> None:
    """With equal scores the output is the mean of the values seen: whose they are is plain to see."""
    plan, heads = Plan(tuple(lengths), *sizes), sizes[0]
    tags = torch.arange(1.0, sum(lengths) + 1, dtype=torch.float64)
    zero = torch.zeros(sum(lengths), heads, 1, dtype=torch.float64)
    values = (tags.view(-1, 1, 1) ** 3).expand(-1, heads, -1)
    shares = [(zero[held], zero[held], values[held]) for held in plan.tokens]
    start = 0
    expected = []
    for length in lengths:
        for at in range(length):
            left = 0 if window[0] < 0 else max(0, at - window[0])
            right = length - 1 if window[1] < 0 else min(length - 1, at + window[1])
            seen = values[start + left : start + right + 1, 0, 0]
            expected.append(float(seen.sum() / len(seen)))
        start += length
    for streaming in (True, False):
        found = plan.collected(sharded_attention(Simulated(plan), shares, window, 1.0, streaming))
        torch.testing.assert_close(found[:, 0, 0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_pieces_of_a_long_stream_are_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are computed a few sequences at a time: the same output, whatever the size of a piece."""
    lengths = (5, 1, 1, 9, 3, 1, 12, 2)
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(sum(lengths), 4, 8, dtype=torch.float64, generator=generator) for _ in range(3)]
    found = []
    for piece in (1, 7, 256):
        monkeypatch.setattr(sharding.plan, "PIECE", piece)
        wire = Simulated(Plan(lengths, 2, 2))
        shares = [(qkv[0][held], qkv[1][held], qkv[2][held]) for held in wire.plan.tokens]
        found.append(wire.plan.collected(sharded_attention(wire, shares, (-1, 0), 0.3)))
    assert sharding.plan._cuts(lengths) == [0, 8]
    torch.testing.assert_close(found[0], found[2], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[1], found[2], rtol=1e-12, atol=1e-14)
    monkeypatch.setattr(sharding.plan, "PIECE", 7)
    assert sharding.plan._cuts(lengths) == [0, 3, 4, 6, 7, 8]
    assert sharding.plan._cuts((2, 2, 3, 1, 3, 3)) == [0, 3, 6]


# --- processes --------------------------------------------------------------------------------------

# Simulator and processes, then trainers: one script, for most of its time goes into starting it.
SCRIPT = """
import torch
import torch.distributed as dist
from impl.sharding import Plan, Ranks, Simulated, sharded_attention

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = dist.get_world_size()
generator = torch.Generator().manual_seed(0)
compared = unequal = empty = 0
for ulysses in (u for u in (1, 2, 4) if world % u == 0):
    ring = world // ulysses
    ranks = Ranks.over(ulysses, ring)
    for lengths in [(1,), (1, 1), (5,), (1, 7, 2, 9, 1, 1), (3, 5), (16, 1), (1,) * 12]:
        whole = [torch.randn(sum(lengths), heads, 4, dtype=torch.float64, generator=generator) for heads in (8, 4, 4)]
        upstream = torch.randn(sum(lengths), 8, 4, dtype=torch.float64, generator=generator)
        processes = ranks.wire(lengths)
        empty += processes.plan.counts[processes.rank] == 0
        for streaming in (True, False):
            for window in ((-1, 0), (-1, -1)):
                results = []
                for wire in (processes, Simulated(Plan(lengths, ulysses, ring))):
                    leaves = [[x[held].requires_grad_() for x in whole] for held in wire.plan.tokens]
                    held = [leaves[rank] for rank in wire.held]
                    outs = sharded_attention(wire, [tuple(each) for each in held], window, 0.5, streaming)
                    torch.autograd.backward(outs, [upstream[wire.plan.tokens[rank]] for rank in wire.held])
                    mine = list(wire.held).index(processes.rank)
                    results.append([outs[mine], *(x.grad for x in held[mine])])
                compared += 4
                unequal += sum(not torch.equal(a, b) for a, b in zip(*results))

from torch.nn.parallel import DistributedDataParallel
import impl
from impl import sharding
from impl.attention import install
from impl.errors import ShardingError
from impl.losses import InfoNCE
from oracle import exact, reference
from oracle.case import Case, Options, Rows, from_lengths
from oracle.models import tiny
from oracle.outcome import same
from oracle.ranks import loss_scale, row_counts, spread

world, equal, gradients, wrong, refused = dist.get_world_size(), 0, 0, 0, 0
for batch in ([[3, 4 + dist.get_rank()]], [[3, 4], [5]] if dist.get_rank() else [[3], [4, 5]]):
    try:
        sharding.encode(tiny("qwen3"), impl.pack(batch, "given"), sharding.Ranks.over(1, world))
    except ShardingError as error:
        refused += "of those that share a batch were given another one than rank 0" in str(error)
try:
    sharding.encode(tiny("qwen3-vl"), impl.multimodal.pack([[128]], [[(1, 2, 2)]], 128), sharding.Ranks.over(1, world))
except ShardingError as error:
    refused += "the batch holds images" in str(error)
try:
    sharding.Ranks.over(0, 2)
except ShardingError as error:
    refused += "ranks are no multiple of Ulysses 0 x ring 2" in str(error)
for ulysses, ring, name, pooling in [
    (2, 1, "bert", "max"), (1, 2, "gemma3", "cls"), (1, 2, "mistral", "mean"),
    (2, 1, "qwen3", "last"), (2, 2, "qwen3", "last"),
]:
    if world % (ulysses * ring):
        continue
    ranks = sharding.Ranks.over(ulysses, ring)
    data, streams = dist.get_rank(ranks.data), dist.get_world_size(ranks.data)
    case = from_lengths([[3, 1, 7], [1, 1], [12, 1, 1, 5], [2, 4]], options=Options(pooling=pooling), model=name)
    shares = spread(case, streams)
    share, model = Case(shares[data], options=case.options, model=name), tiny(name)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, sequences):
            return sharding.encode(self.model, impl.pack(sequences), ranks, pooling, streaming=False)

    recomputed = name == "qwen3" and ring == 1
    if recomputed:
        before = model.config._attn_implementation
        install(model, "sharded")
        model.gradient_checkpointing_enable()
    trainer = DistributedDataParallel(Encoder())
    with exact(loss_scale=loss_scale(world)):
        embeddings = trainer(share.sequences)
        loss = sharding.loss(InfoNCE(), embeddings, torch.tensor(share.labels, dtype=torch.float64), ranks)
        loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    if recomputed:
        model.gradient_checkpointing_disable()
        model.set_attn_implementation(before)
    with exact():
        expected = reference.step(model, case, Rows())
    mine = expected.embeddings.split(row_counts(shares))[data]
    equal += same(mine, embeddings.detach()) and same(expected.loss, loss.detach())
    gradients += len(expected.gradients)
    wrong += sum(not same(expected.gradients[n], found[n]) for n in expected.gradients)
print(f"rank {dist.get_rank()} empty {empty} compared {compared} unequal {unequal} refused {refused} equal {equal} "
      f"gradients {gradients} wrong {wrong}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("world", "trainers"), [(2, 4), (4, 5)])
def test_processes_are_the_simulator_and_trainers_over_shards_one_process(world: int, trainers: int) -> None:
    """In every bit. Attention in plain float64, forward and backward, in one round and in three, ranks without
    tokens too. DDP with decoders, an encoder, a window, four poolings, layers computed again; on four ranks
    data parallel beside.
    """
    lines = launch(world, SCRIPT)
    meshes = len([u for u in (1, 2, 4) if world % u == 0])
    assert all(f"compared {meshes * 7 * 2 * 2 * 4} unequal 0 " in line for line in lines), lines
    assert not all(" empty 0 " in line for line in lines), "some rank must have held slots only"
    assert all(f" refused 4 equal {trainers} " in line and line.endswith("wrong 0") for line in lines), lines


@pytest.mark.slow
def test_the_readmes_trainer_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text[text.index("    # train.py\n") :]
    block = block[: block.index("destroy_process_group()") + len("destroy_process_group()")]
    said = [line.split() for line in run(4, textwrap.dedent(block)).splitlines()]
    assert [step for step, _ in said] == ["0", "1", "2"]
    losses = [float(loss) for _, loss in said]
    assert losses[0] > losses[1] > losses[2] > 0


def test_a_plan_reads_a_packed_batch() -> None:
    packed = pack([[1, 2, 3], [4], [5, 6]])
    shards = Plan(packed.lengths, 1, 2).split(packed.input_ids, fill=0)
    assert [shard.tolist() for shard in shards] == [[4, 0, 5, 0, 1, 0], [0, 0, 6, 0, 2, 3]]
