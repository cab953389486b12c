"""What the strategies of images and meshes draw, how often, and how far they shrink."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import find, settings
from hypothesis.strategies import SearchStrategy

from impl.sharding import Plan
from oracle.case import IMAGE_ID, Case, grids
from oracle.laws.sharding import BESIDE, RING, SIMULATED, ULYSSES
from oracle.strategies import image_cases, mesh_cases
from tests.drawing import Features, check_features, drawn

DRAWS = 400


def _in_stream(case: Case) -> list[tuple[int, ...]]:
    return [case.sequences[i] for i in case.stream.arranged(len(case.sequences))]


IMAGES: Features = {
    "text only beside images": (0.40, lambda c: any(IMAGE_ID not in s for s in c.sequences)),
    "image between text": (0.20, lambda c: any(s[0] != IMAGE_ID != s[-1] and IMAGE_ID in s for s in c.sequences)),
    "image first": (0.40, lambda c: any(s[0] == IMAGE_ID for s in c.sequences)),
    "image last": (0.30, lambda c: any(s[-1] == IMAGE_ID for s in c.sequences)),
    "image alone": (0.15, lambda c: any(set(s) == {IMAGE_ID} for s in c.sequences)),
    "several images in a sequence": (0.25, lambda c: any(len(own) > 1 for own in grids(c.sequences, c.images))),
    "a sequence of one token": (0.40, lambda c: 1 in c.lengths),
    "two images that meet at a boundary": (
        0.10,
        lambda c: any(a[-1] == IMAGE_ID == b[0] for a, b in pairwise(_in_stream(c))),
    ),
    "several frames": (0.25, lambda c: any(t > 1 for t, _, _ in c.images)),
    "an image higher than wide": (0.20, lambda c: any(h > w for _, h, w in c.images)),
    "slots": (0.20, lambda c: c.stream.tail > 1 or c.stream.each > 1),
    "another order": (0.20, lambda c: c.stream.order not in (None, tuple(range(len(c.lengths))))),
    "either model": (0.30, lambda c: c.model == "qwen3-vl"),
}


def _plan(case: Case) -> Plan:
    return Plan(tuple(len(s) for s in _in_stream(case)), case.mesh.ulysses, case.mesh.ring)


def _rank_of(plan: Plan) -> dict[int, int]:
    return {token: rank for rank, held in enumerate(plan.tokens) for token in held.tolist()}


def _ends(plan: Plan) -> list[tuple[int, int]]:
    """First and last token of each sequence."""
    starts = [sum(plan.lengths[:i]) for i in range(len(plan.lengths))]
    return [(start, start + length - 1) for start, length in zip(starts, plan.lengths, strict=True)]


def _last_is_elsewhere(case: Case) -> bool:
    plan = _plan(case)
    rank = _rank_of(plan)
    return any(rank[first] != rank[last] for first, last in _ends(plan))


def _last_at_an_edge(case: Case) -> bool:
    plan = _plan(case)
    edges = {int(held[-1]) for held in plan.padded[plan.shards]}
    return any(last in edges for _, last in _ends(plan))


def _last_beside_a_slot(case: Case) -> bool:
    plan = _plan(case)
    beside = {int(a) for held in plan.padded[plan.shards] for a, b in pairwise(held.tolist()) if a >= 0 > b}
    return any(last in beside for _, last in _ends(plan))


MESHES: Features = {
    "a rank with slots only": (0.05, lambda c: 0 in _plan(c).counts),
    "a last token on another rank than the first": (0.40, _last_is_elsewhere),
    "a last token at a shard's edge": (0.30, _last_at_an_edge),
    "a last token beside a slot": (0.30, _last_beside_a_slot),
    "slots at the tail only": (0.05, lambda c: c.mesh.ring == 1 and (_plan(c).padded < 0).any().item()),
    "no slot at all": (0.03, lambda c: not (_plan(c).padded < 0).any().item()),
    "ranks with different numbers of tokens": (0.40, lambda c: len(set(_plan(c).counts)) > 1),
}

PROCESSES: Features = {
    "four ranks share a sequence": (0.20, lambda c: c.mesh.sharing == 4),
    "two ranks": (0.20, lambda c: c.mesh.ranks == 2),
    "another pooling": (0.20, lambda c: c.options.pooling != "last"),
    "a sliding window that cuts": (0.02, lambda c: c.model == "mistral" and max(c.lengths) > 4),
}

BATCHES: Features = {
    "batches of different sizes": (0.40, lambda c: len(c.groups) > c.mesh.data),
    "Ulysses": (0.30, lambda c: c.mesh.ulysses == 2),
    "a ring": (0.30, lambda c: c.mesh.ring == 2),
}


def test_features_of_images_are_drawn_often_enough() -> None:
    check_features(IMAGES, drawn(image_cases(), DRAWS))


def test_features_of_simulated_meshes_are_drawn_often_enough() -> None:
    check_features(MESHES, drawn(mesh_cases(SIMULATED, model_matters=False), DRAWS))


@pytest.mark.parametrize("meshes", [ULYSSES, RING], ids=["ulysses", "ring"])
def test_features_of_processes_are_drawn_often_enough(meshes: tuple[tuple[int, int, int], ...]) -> None:
    check_features(PROCESSES, drawn(mesh_cases(meshes), DRAWS))


def test_features_of_batches_beside_each_other_are_drawn_often_enough() -> None:
    check_features(BATCHES, drawn(mesh_cases(BESIDE), DRAWS))


@pytest.mark.parametrize(
    ("strategy", "predicate", "smallest"),
    [
        (image_cases(), lambda c: True, [1, 2]),
        (image_cases(), lambda c: any(len(own) > 1 for own in grids(c.sequences, c.images)), [1, 4]),
        (mesh_cases(SIMULATED, model_matters=False), lambda c: True, [1, 1]),
        (mesh_cases(SIMULATED, model_matters=False), lambda c: c.mesh.ring > 1, [1, 1]),
        (mesh_cases(SIMULATED, model_matters=False), _last_is_elsewhere, [1, 2]),
    ],
)
def test_shrinking_reaches_the_known_minimum(
    strategy: SearchStrategy[Case], predicate: Callable[[Case], bool], smallest: list[int]
) -> None:
    found = find(strategy, predicate, settings=settings(max_examples=2000, database=None, derandomize=True))
    assert sorted(found.lengths) == smallest
    assert (found.rows.extra, found.rows.junk, found.stream.tail, found.stream.each, found.seed) == (0, 0, 1, 1, 0)
