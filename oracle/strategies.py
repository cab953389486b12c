"""Hypothesis strategies: structure is drawn (lengths, groups, layouts, options), never tensor values.

Faults live in sequences of one token, in runs of them, in equal lengths, in one giant among ones, beside
powers of two; so these come often. Everything shrinks towards ones, two sequences, a plain layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from hypothesis import strategies as st

from oracle.case import (
    PAIR_LOSSES,
    POOLINGS,
    Case,
    Grid,
    Group,
    Mesh,
    Options,
    Rows,
    Stream,
    from_lengths,
    from_parts,
)
from oracle.models import MODELS, PAD_ID, VISUAL, VOCABULARY, key_value_heads, kind

EDGES = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65)
LONGEST = 65


@cache
def lengths(longest: int = LONGEST) -> st.SearchStrategy[int]:
    """One sequence's length: often 1, often short, sometimes at a power of two."""
    edges = [edge for edge in EDGES if edge <= longest] or [1]
    short, any_ = st.integers(1, min(8, longest)), st.integers(1, min(40, longest))
    return st.one_of(st.just(1), st.just(1), short, st.sampled_from(edges), any_)


@cache
def runs(most: int = 4, longest: int = LONGEST) -> st.SearchStrategy[list[int]]:
    """Lengths as runs of equal ones: [(length, times), ...] laid out."""
    run = st.tuples(lengths(longest), st.integers(1, 4))
    return st.lists(run, max_size=most).map(lambda drawn: [length for length, times in drawn for _ in range(times)])


@st.composite
def groups(draw: st.DrawFn, most: int = 4, longest: int = LONGEST, least: int = 1) -> list[list[int]]:
    """Lengths of ``least`` to ``most`` groups, [anchor, positive, negatives...]; now and then all are equal."""
    equal = draw(st.sampled_from([False] * 4 + [True]))
    drawn = [
        [draw(lengths(longest)), draw(lengths(longest)), *draw(runs(2, longest))]
        for _ in range(draw(st.integers(least, most)))
    ]
    return [[drawn[0][0]] * len(group) for group in drawn] if equal else drawn


@cache
def row_layouts() -> st.SearchStrategy[Rows]:
    """Padded rows: either side, extra columns, pad ids or junk."""
    return st.builds(Rows, st.sampled_from(["right", "left"]), st.integers(0, 5), st.integers(0, 3))


@st.composite
def stream_layouts(draw: st.DrawFn, count: int, slots: bool = True, shuffled: bool = True) -> Stream:
    """Packed streams of ``count`` sequences: any order, slots at the tail and after each sequence."""
    order = tuple(draw(st.permutations(range(count)))) if shuffled and draw(st.booleans()) else None
    if not slots or not draw(st.sampled_from([False, True, True])):
        return Stream(order)
    return Stream(
        order, draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(0, 3))
    )


@cache
def options(pooling: str = "last") -> st.SearchStrategy[Options]:
    """Temperatures in use, powers of two and others, with and without the rest of the batch.

    pooling: one of them, "any", or "mostly last".
    """
    several = {"any": POOLINGS, "mostly last": ("last", "last", "last", *POOLINGS)}
    poolings = st.sampled_from(several.get(pooling, (pooling,)))
    temperatures = st.sampled_from([0.1, 1.0, 0.05, 0.01, 0.5])
    return st.builds(Options, temperatures, st.sampled_from([True, False]), poolings)


@cache
def group_options(loss: str = "infonce") -> st.SearchStrategy[Options]:
    """Every option of the losses over groups; each of them alone as often as with others."""
    names = ("mask_fake_negative", "include_qq", "include_dd")
    chosen = st.sampled_from([taken for count in range(len(names) + 1) for taken in combinations(names, count)])
    plain = st.builds(
        Options,
        temperature=st.sampled_from([0.1, 1.0, 0.05]),
        use_batch=st.sampled_from([True, True, True, False]),
        loss=st.just(loss),
        fake_negative_margin=st.sampled_from([0.1, 0.0, 0.25]),
    )
    return st.builds(lambda options, taken: replace(options, **dict.fromkeys(taken, True)), plain, chosen)


@st.composite
def loss_cases(draw: st.DrawFn, loss: str, model: str = "qwen3", least_groups: int = 1) -> Case:
    """Cases for laws on losses alone: the sequences only count."""
    if loss in PAIR_LOSSES:
        labels = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8))
        pairs = tuple(Group((3,), (4,), label=label) for label in labels)
        return Case(pairs, options=Options(loss=loss), model=model, seed=draw(st.integers(0, 30)))
    sizes = draw(st.lists(st.integers(0, 4), min_size=least_groups, max_size=6))
    chosen = draw(group_options("qwen3" if loss == "qwen3" else "infonce"))
    if loss == "hard_negatives":
        sizes = [max(1, size) for size in sizes]
        chosen = replace(chosen, hard_negatives=draw(st.integers(1, 4)), resample_seed=draw(st.integers(0, 3)))
    if loss == "matryoshka":
        chosen = replace(chosen, matryoshka=draw(st.sampled_from([((4, 1.0),), ((8, 0.5), (16, 1.0))])))
    labels_ = [draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])) for _ in sizes]
    groups_ = tuple(
        Group((3,), (4,), tuple((5,) for _ in range(size)), label) for size, label in zip(sizes, labels_, strict=True)
    )
    return Case(groups_, options=chosen, model=model, seed=draw(st.integers(0, 30)))


@st.composite
def cases(
    draw: st.DrawFn,
    model: str = "qwen3",
    pooling: str = "last",
    contrast: bool = False,
    slots: bool = True,
    shuffled: bool = True,
    longest: int = LONGEST,
    least_groups: int = 1,
) -> Case:
    """Whole cases for one model; with ``contrast`` the loss has something to choose between."""
    drawn = draw(groups(longest=min(longest, kind(model).longest), least=least_groups))
    chosen = draw(options(pooling))
    if contrast and _candidates(drawn, chosen) < 2:
        drawn[0].append(1)
    # Now and then the pad's and other special ids are ordinary tokens, or texts begin alike.
    first, alike = draw(st.sampled_from([3, 3, 0])), draw(st.sampled_from([False, False, False, True]))
    alike = alike and not contrast
    # A closing token is often the pad's own id, which then stands nowhere else. Texts of it alone are all the same:
    # there would be nothing to choose between.
    shortest = min(map(min, drawn)) if contrast else max(map(max, drawn))
    end = draw(st.sampled_from([None] * 5 + [PAD_ID])) if shortest > 1 else None
    first = first if end is None else max(first, PAD_ID + 1)
    return from_lengths(
        drawn,
        VOCABULARY,
        first,
        alike,
        end,
        rows=draw(row_layouts()),
        stream=draw(stream_layouts(sum(map(len, drawn)), slots, shuffled)),
        options=chosen,
        model=model,
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def long_cases(draw: st.DrawFn, beyond: int, model: str = "qwen3") -> Case:
    """One group of few texts, some of them a little longer than ``beyond`` tokens."""
    about = [1, 2, beyond - 1, beyond, beyond + 1, beyond + 2, beyond + 44]
    length = st.sampled_from([each for each in about if each <= kind(model).longest])
    drawn = [draw(length), draw(length), *draw(st.lists(length, max_size=1))]
    layout = Stream(tuple(draw(st.permutations(range(len(drawn))))))
    return from_lengths([drawn], VOCABULARY, rows=draw(row_layouts()), stream=layout, model=model)


def _candidates(groups_: Sequence[Sequence[object]], chosen: Options) -> int:
    """How many documents an anchor chooses between, where it has most: with one there is nothing to learn."""
    sizes = [len(group) - 1 for group in groups_]
    return sum(sizes) if chosen.use_batch else max(sizes)


@cache
def parts() -> st.SearchStrategy[list[int | Grid]]:
    """One sequence: lengths of text, and images as grids of patches; two images have text between them."""
    text = st.one_of(st.just(1), st.integers(1, 6))
    side = st.sampled_from([2, 2, 4, 6])
    image = st.tuples(st.sampled_from([1, 1, 1, 2]), side, side)
    return st.one_of(
        st.tuples(text),
        st.tuples(text),
        st.tuples(image, text),
        st.tuples(text, image, text),
        st.tuples(image),
        st.tuples(text, image),
        st.tuples(image, text, image, text),
    ).map(list)


@st.composite
def image_cases(
    draw: st.DrawFn, images: bool = True, model: str = "qwen3", slots: bool = True, contrast: bool = False
) -> Case:
    """Sequences of text and images; at least one image, beside sequences of one token.

    With ``contrast`` the loss has something to choose between.
    """
    chosen = model if MODELS[model].visual else draw(st.sampled_from(VISUAL))
    drawn = [
        [draw(parts()), draw(parts()), *draw(st.lists(parts(), max_size=3))] for _ in range(draw(st.integers(1, 3)))
    ]
    if not any(isinstance(part, tuple) for group in drawn for sequence in group for part in sequence):
        drawn[0][1] = [(1, 2, 4)]
    chosen_options = draw(options())
    if contrast and _candidates(drawn, chosen_options) < 2:
        drawn[0].append([1])
    return from_parts(
        drawn,
        VOCABULARY,
        rows=draw(row_layouts()),
        stream=draw(stream_layouts(sum(map(len, drawn)), slots)),
        options=chosen_options,
        model=chosen,
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def mesh_cases(
    draw: st.DrawFn,
    meshes: tuple[tuple[int, int, int], ...],
    model: str = "qwen3",
    longest: int = 17,
    model_matters: bool = True,
) -> Case:
    """Cases for a mesh (Ulysses, ring, data), with a group for every data rank at least.

    model_matters: the model computes, with any pooling. Then Ulysses ranks divide its key-value heads, and for
    the default model one with more of them, or one with a sliding window, may stand.
    """
    if not model_matters:
        mesh = Mesh(*draw(st.sampled_from(meshes)))
        return replace(draw(cases(model, longest=longest)), mesh=mesh)
    mesh = Mesh(*draw(st.sampled_from([m for m in meshes if model == "qwen3" or key_value_heads(model) % m[0] == 0])))
    chosen = model
    if model == "qwen3":
        chosen = draw(st.sampled_from([model, model, model, "mistral"])) if mesh.ulysses <= 2 else "qwen3-mha"
    case = draw(cases(chosen, "mostly last", contrast=True, longest=longest, least_groups=mesh.data))
    return replace(case, mesh=mesh)
