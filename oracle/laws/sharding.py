"""Sharding: a stream over several ranks is the stream, and a step over them is the step of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oracle import reference
from oracle.case import Case
from oracle.exact import exact, plain
from oracle.laws.agreement import padded_step, warmed
from oracle.laws.law import Broken, HangError, law
from oracle.models import tiny
from oracle.outcome import Difference, Outcome, compare, compare_embeddings, gap, gradient_pairs, same
from oracle.ranks import RankDeclinedError, RankError, RankHangError, ShardedResult, over_mesh, row_counts, spread
from oracle.tolerances import STREAMING

SIMULATED = ((2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 1), (4, 1, 1), (1, 4, 1), (3, 2, 1), (2, 4, 1), (1, 1, 1))
ULYSSES = ((2, 1, 1), (4, 1, 1))
RING = ((1, 2, 1), (1, 4, 1))
BESIDE = ((2, 1, 2), (1, 2, 2))


def _shown(case: Case) -> list[str]:
    mesh = case.mesh
    return [f"lengths {_lengths(case)} in the stream, Ulysses {mesh.ulysses} x ring {mesh.ring}, data {mesh.data}"]


def _lengths(case: Case) -> list[int]:
    return [case.lengths[i] for i in case.stream.arranged(len(case.lengths))]


def _split(implementation: Any, case: Case, values: Tensor, dim: int = 0, fill: float = 0) -> list[Tensor]:
    mesh = case.mesh
    shards = list(implementation.split(values, _lengths(case), mesh.ulysses, mesh.ring, dim, fill))
    sizes = [shard.shape[dim] for shard in shards]
    if len(shards) != mesh.sharing or len(set(sizes)) != 1:
        raise Broken(f"shards of {sizes} tokens, expected {mesh.sharing} of one size", _shown(case))
    return shards


def _picture(shards: list[Tensor]) -> list[str]:
    """The tokens each rank holds by their place in the stream; a dot is a slot."""
    return [
        f"rank {r} holds  {' '.join('.' if tag < 0 else str(int(tag)) for tag in shard.flatten().tolist())}"
        for r, shard in enumerate(shards)
    ]


@law("gather", share=40, meshes=SIMULATED, longest=33, model_matters=False)
def split_then_gather_is_the_identity(implementation: Any, case: Case) -> None:
    """Every token is on one rank, and gathering the shards gives back the stream, slots left out."""
    total = sum(case.lengths)
    tags = torch.arange(total)
    shards = _split(implementation, case, tags, fill=-1)
    held = sorted(int(tag) for shard in shards for tag in shard.tolist() if tag >= 0)
    if held != list(range(total)):
        raise Broken(f"the ranks hold {len(held)} tokens of {total}", [*_shown(case), *_picture(shards)])
    found = implementation.gather(shards, _lengths(case), case.mesh.ulysses, case.mesh.ring)
    if not same(found, tags):
        wrong = next((i for i, (a, b) in enumerate(zip(tags, found, strict=False)) if a != b), min(total, len(found)))
        got = found.tolist()[wrong : wrong + 8]
        raise Broken(
            f"{len(found)} tokens gathered of {total}; from token {wrong} on it reads {got}",
            [*_shown(case), *_picture(shards)],
        )


@law("split", share=30, meshes=SIMULATED, longest=17, model_matters=False)
def every_field_is_laid_out_alike(implementation: Any, case: Case) -> None:
    """Ids, embeddings, masks and rows of position ids are cut at the same places: what belongs together stays so."""
    total = sum(case.lengths)
    tags = torch.arange(total)
    places = _split(implementation, case, tags, fill=-1)
    fields = {
        "embeddings [T, d]": (torch.stack([tags, -tags], dim=1).double(), 0, 0.5),
        "a mask [T]": (tags % 2 == 0, 0, 0),
        "rows of position ids [3, T]": (torch.stack([tags, tags + 7, 2 * tags]), 1, -1),
    }
    for name, (values, dim, fill) in fields.items():
        for rank, (place, shard) in enumerate(
            zip(places, _split(implementation, case, values, dim, fill), strict=True)
        ):
            wanted = values.index_select(dim, place.clamp(min=0))
            slots = (place < 0).view([-1 if d == dim else 1 for d in range(values.dim())])
            wanted = torch.where(slots, torch.as_tensor(fill, dtype=values.dtype), wanted)
            if not same(wanted, shard):
                raise Broken(
                    f"rank {rank} holds other tokens of {name} than of the ids", [*_shown(case), *_picture(places)]
                )


@law("gather", share=20, meshes=SIMULATED, longest=17, model_matters=False)
def what_stands_in_a_shards_slots_stays_there(implementation: Any, case: Case) -> None:
    """NaN in the slots of shards is not gathered, and NaN in their gradient does not reach the stream."""
    total, mesh = sum(case.lengths), case.mesh
    slots = [shard < 0 for shard in _split(implementation, case, torch.arange(total), fill=-1)]
    values = torch.arange(1.0, total + 1, dtype=torch.float64)
    leaf = values.clone().requires_grad_()
    shards = _split(implementation, case, leaf)
    spoilt = [torch.where(slot, torch.nan, shard) for slot, shard in zip(slots, shards, strict=True)]
    found = implementation.gather(spoilt, _lengths(case), mesh.ulysses, mesh.ring)
    if not same(found.detach(), values):
        spoiled = int(found.isnan().sum())
        told = f"{spoiled} of {total} tokens were gathered as NaN" if spoiled else "other tokens were gathered"
        raise Broken(told, _shown(case))
    upstream = [torch.where(slot, torch.nan, shard.detach()) for slot, shard in zip(slots, shards, strict=True)]
    (gradient,) = torch.autograd.grad(shards, leaf, upstream, retain_graph=True)
    (through,) = torch.autograd.grad(found, leaf, values)
    for what, got in (("split", gradient), ("gather", through)):
        if not same(got, values):
            wrong = int((got != values).nonzero()[0])
            told = f"token {wrong}'s gradient is {float(got[wrong])}, expected {float(values[wrong])}"
            raise Broken(f"through {what} with NaN in the slots {told}", _shown(case))


@law("sharded_attention", share=28, meshes=SIMULATED, longest=12, model_matters=False)
def attention_over_shards_equals_the_whole(implementation: Any, case: Case) -> None:
    """Attention over shards, forward and backward, equals, bit for bit, that of each sequence in one piece."""
    lengths, mesh = _lengths(case), case.mesh
    causal, heads, kv_heads = case.seed % 2 == 0, 4 * mesh.ulysses, 2 * mesh.ulysses
    generator = torch.Generator().manual_seed(case.seed)

    def draw(count: int) -> Tensor:
        return torch.randint(-300, 301, (sum(lengths), count, 4), generator=generator).double() / 256

    inputs = draw(heads).requires_grad_(), draw(kv_heads).requires_grad_(), draw(kv_heads).requires_grad_()
    upstream = draw(heads)
    with exact():
        expected = _attention(*inputs, lengths, causal)
        wanted = torch.autograd.grad(expected, inputs, upstream)
        found = implementation.sharded_attention(*inputs, lengths, mesh.ulysses, mesh.ring, causal)
        got = torch.autograd.grad(found, inputs, upstream)
    kind = "causal" if causal else "bidirectional"
    pairs = [("output", expected.detach(), found.detach())]
    pairs += [(f"gradient of {name}", a, b) for name, a, b in zip(("q", "k", "v"), wanted, got, strict=True)]
    for what, a, b in pairs:
        if not same(a, b):
            wrong = "shapes differ" if a.shape != b.shape else f"greatest difference {gap(a, b):.3g}"
            at = "" if a.shape != b.shape else f", first at token {int((a != b).flatten(1).any(1).nonzero()[0])}"
            raise Broken(f"{what} of {kind} attention: {wrong}{at}", _shown(case))


def _attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Attention of each sequence by itself: softmax(q k^T / root d) v."""
    outputs = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        length, group = len(qs), q.shape[1] // k.shape[1]
        queries = qs.transpose(0, 1)
        keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (ks, vs))
        scores = queries @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


# --- real processes ---------------------------------------------------------------------------------


def _over_mesh(
    implementation: Any, case: Case, surface: str = "sharded_step", exactly: bool = True
) -> list[ShardedResult]:
    try:
        return over_mesh(implementation, case, surface, exactly)
    except RankDeclinedError as error:
        raise NotImplementedError from error
    except RankError as error:
        raise (HangError if isinstance(error, RankHangError) else Broken)(str(error), _shown(case)) from error


def _ranks(case: Case, expected: Outcome, results: list[ShardedResult]) -> Iterator[tuple[str, Outcome, Outcome]]:
    """Of every rank: its name, what it should have, and what it has."""
    pieces = expected.embeddings.split(row_counts(spread(case, case.mesh.data)))
    for rank, result in enumerate(results):
        wanted = Outcome(pieces[rank // case.mesh.sharing], expected.loss, expected.gradients)
        yield f"rank {rank} of {case.mesh.ranks}", wanted, Outcome(result.embeddings, result.loss, result.gradients)


def _equal_one_process(implementation: Any, case: Case) -> None:
    with exact():
        case, expected = padded_step(case)
    for who, wanted, found in _ranks(case, expected, _over_mesh(implementation, case)):
        difference = compare(wanted, found)
        if difference:
            hint = _only_rounding(implementation, case) if difference.size < 1e-3 else []
            raise Broken(f"{who}: {difference}", [*_shown(case), *hint])


def _only_rounding(implementation: Any, case: Case) -> list[str]:
    """What to make of a difference so small that a factor in another place might explain it."""
    with plain():
        expected = reference.step(tiny(case.model, case.seed), case, case.rows)
    results = _over_mesh(implementation, case, exactly=False)
    farthest = max(
        size for _, wanted, found in _ranks(case, expected, results) for _, _, size in distances(wanted, found)
    )
    if farthest > STREAMING.bound:
        return [f"in plain float64 they differ too, by {farthest:.3g}"]
    return [
        f"in plain float64 they agree to {farthest:.3g}: is the factor of the ranks on the loss, before backward? "
        "A step with factors elsewhere is to be offered as streaming_step"
    ]


@law("sharded_step", share=6, meshes=ULYSSES)
def ulysses_equals_one_process(implementation: Any, case: Case) -> None:
    """A step over Ulysses ranks: embeddings, loss and averaged gradients, bit for bit, of one process."""
    _equal_one_process(implementation, case)


@law("sharded_step", share=6, meshes=RING)
def a_ring_equals_one_process(implementation: Any, case: Case) -> None:
    """A step over a ring: embeddings, loss and averaged gradients, bit for bit, of one process on padded rows."""
    _equal_one_process(implementation, case)


@law("sharded_step", share=4, meshes=((2, 2, 1),))
def ulysses_times_ring_equals_one_process(implementation: Any, case: Case) -> None:
    """A step over Ulysses times ring: embeddings, loss and averaged gradients, bit for bit, of one process."""
    _equal_one_process(implementation, case)


@law("sharded_step", share=4, meshes=BESIDE)
def batches_beside_each_other_equal_one_process(implementation: Any, case: Case) -> None:
    """Two batches, each over Ulysses ranks or a ring: the whole batch's loss and averaged gradients, bit for bit."""
    _equal_one_process(implementation, case)


@law("streaming_step", share=7, meshes=((1, 2, 1), (1, 4, 1), (2, 2, 1)))
def a_streaming_ring_is_within_a_grid_step(implementation: Any, case: Case) -> None:
    """With a running log-sum-exp, in plain float64: within 2^-36 of one process, gradients over their largest."""
    case = warmed(case)
    with plain():
        expected = reference.step(tiny(case.model, case.seed), case, case.rows)
    results = _over_mesh(implementation, case, "streaming_step", exactly=False)
    for who, wanted, found in _ranks(case, expected, results):
        difference = first_beyond(wanted, found, STREAMING.bound)
        if difference:
            raise Broken(f"{who}: {difference}", _shown(case))


def first_beyond(expected: Outcome, found: Outcome, bound: float) -> Difference | None:
    """The first difference larger than ``bound``, embeddings by sequence, gradients, the loss last."""
    if expected.embeddings.shape != found.embeddings.shape:
        return compare_embeddings(expected.embeddings, found.embeddings)
    for what, sequence, size in distances(expected, found):
        if size > bound:
            return Difference(what, f"off by {size:.3g}, allowed {bound:.3g}", sequence, size)
    return None


def distances(expected: Outcome, found: Outcome) -> Iterator[tuple[str, int | None, float]]:
    """What, of which sequence, and by how much: each gradient's difference over its largest number, or over 1."""
    for i, (a, b) in enumerate(zip(expected.embeddings, found.embeddings, strict=True)):
        yield "embeddings", i, gap(a, b)
    for name, a, b in gradient_pairs(expected.gradients, found.gradients):
        yield f"gradient of {name}", None, gap(a, b) / max(1.0, float(a.abs().max()))
    yield "loss", None, gap(expected.loss, found.loss)
