"""A case: what to compute. Small enough to paste into a bug report, and JSON both ways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

POOLINGS = ("last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean")
PAIR_LOSSES = ("cosine_similarity", "contrastive", "online_contrastive")
LOSSES = ("infonce", "qwen3", *PAIR_LOSSES)
SIDES = ("right", "left")
PADS = ("slots", "counted", "zeros")

IMAGE_ID = 128  # stands for one token of an image; text ids lie below
PATCHES = 4  # patches of an image that one of its tokens stands for: two by two

Grid = tuple[int, int, int]


class CaseError(ValueError):
    """A case that means nothing; names the group, sequence or option at fault."""


@dataclass(frozen=True)
class Group:
    """An anchor, its positive and any number of negatives, each a non-empty tuple of token ids.

    label: the positive's entry in the batch's labels; not zero, since zero marks a negative, unless the
        loss is one of pairs, whose labels it holds.
    """

    anchor: tuple[int, ...]
    positive: tuple[int, ...]
    negatives: tuple[tuple[int, ...], ...] = ()
    label: float = 1.0

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """Anchor, positive, negatives: the order of a training row."""
        return [self.anchor, self.positive, *self.negatives]


@dataclass(frozen=True)
class Options:
    """How embeddings and loss are made of hidden states. Defaults are ms-swift 4.6.0's.

    pooling: how a sequence's hidden states become one vector, L2-normalised after.
    loss: which loss; "qwen3" is the Qwen3-Embedding paper's own formula.
    temperature: divides the similarities, after masking.
    use_batch: the other groups' documents are negatives too.
    hard_negatives: every group gets exactly so many; drawn again from its own with ``resample_seed``.
    mask_fake_negative, fake_negative_margin: drop negatives more similar than the positive plus margin.
    include_qq: other anchors are negatives. include_dd: documents against the own positive.
    matryoshka: (dimensions, weight) pairs; the loss of each prefix, renormalised, weighted and summed.
    """

    temperature: float = 0.1
    use_batch: bool = True
    pooling: str = "last"
    loss: str = "infonce"
    hard_negatives: int | None = None
    resample_seed: int = 0
    mask_fake_negative: bool = False
    fake_negative_margin: float = 0.1
    include_qq: bool = False
    include_dd: bool = False
    matryoshka: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise CaseError(f"temperature must be positive, found {self.temperature}")
        if self.pooling not in POOLINGS:
            raise CaseError(f"pooling must be one of {', '.join(POOLINGS)}, found {self.pooling!r}")
        if self.loss not in LOSSES:
            raise CaseError(f"loss must be one of {', '.join(LOSSES)}, found {self.loss!r}")
        if self.hard_negatives is not None and self.hard_negatives < 1:
            raise CaseError(f"hard_negatives must be at least 1, found {self.hard_negatives}")
        for dimensions, _ in self.matryoshka:
            if dimensions < 1:
                raise CaseError(f"matryoshka dimensions must be positive, found {dimensions}")

    @property
    def of_pairs(self) -> bool:
        """Whether the loss compares pairs of rows rather than groups."""
        return self.loss in PAIR_LOSSES


@dataclass(frozen=True)
class Rows:
    """Padded rows. side: where the pads go. extra: columns beyond the longest sequence.

    junk: 0 fills the pads with the pad id, anything else with ids drawn from that seed.
    """

    side: str = "right"
    extra: int = 0
    junk: int = 0

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise CaseError(f"side must be right or left, found {self.side!r}")
        if self.extra < 0:
            raise CaseError(f"extra columns cannot be negative, found {self.extra}")


@dataclass(frozen=True)
class Stream:
    """A packed stream. order: sequence indices as they stand in the stream (None: as given).

    tail: slots (position id -1) at the end until the whole divides by it (Ulysses).
    each: slots after every sequence until it divides by it (ring). junk: as in ``Rows``, for the slots.
    pads: how the slots at the tail are numbered: "slots" -1, "counted" 0, 1, 2, ..., "zeros" all 0.
    slot: the id in every slot, whatever ``junk`` says.
    """

    order: tuple[int, ...] | None = None
    tail: int = 1
    each: int = 1
    junk: int = 0
    pads: str = "slots"
    slot: int | None = None

    def __post_init__(self) -> None:
        if self.tail < 1 or self.each < 1:
            raise CaseError(f"multiples must be at least 1, found tail {self.tail} and each {self.each}")
        if self.pads not in PADS:
            raise CaseError(f"pads must be one of {', '.join(PADS)}, found {self.pads!r}")

    def arranged(self, count: int) -> tuple[int, ...]:
        """The order as a permutation of range(count)."""
        order = tuple(range(count)) if self.order is None else self.order
        if sorted(order) != list(range(count)):
            raise CaseError(f"order {order} is not a permutation of {count} sequences")
        return order


@dataclass(frozen=True)
class Mesh:
    """The processes of a sharded step: how many share a sequence, and how many batches run beside each other.

    Rank = (data rank * ring + ring rank) * ulysses + Ulysses rank.
    """

    ulysses: int = 1
    ring: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        if min(self.ulysses, self.ring, self.data) < 1:
            raise CaseError(f"a mesh's sizes must be at least 1, found {self}")

    @property
    def sharing(self) -> int:
        """Ranks that share each sequence."""
        return self.ulysses * self.ring

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.sharing * self.data


@dataclass(frozen=True)
class Case:
    """Groups, how they are laid out both ways, the options, and the model by name and seed.

    images: grids in patches (frames, height, width), in row order: each run of IMAGE_ID in a sequence is
        the next one. mesh: the processes, for sharded steps.
    """

    groups: tuple[Group, ...]
    rows: Rows = field(default_factory=Rows)
    stream: Stream = field(default_factory=Stream)
    options: Options = field(default_factory=Options)
    model: str = "qwen3"
    seed: int = 0
    images: tuple[Grid, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)

    def __post_init__(self) -> None:
        if not self.groups:
            raise CaseError("a case needs at least one group")
        for g, group in enumerate(self.groups):
            if self.options.of_pairs and group.negatives:
                raise CaseError(f"group {g} has negatives; {self.options.loss} compares pairs")
            if group.label == 0 and not self.options.of_pairs:
                raise CaseError(f"group {g}: label 0 marks a negative, a positive's label must not be 0")
            for name, ids in zip(_names(group), group.sequences, strict=True):
                if not ids:
                    raise CaseError(f"group {g}: its {name} is empty; an empty sequence has no embedding")
                if min(ids) < 0:
                    raise CaseError(f"group {g}: its {name} holds the token id {min(ids)}")
        self.stream.arranged(len(self.sequences))
        if self.images:
            grids(self.sequences, self.images)

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """All sequences in row order: group after group, anchor, positive, negatives."""
        return [ids for group in self.groups for ids in group.sequences]

    @property
    def lengths(self) -> list[int]:
        """Token counts in row order."""
        return [len(ids) for ids in self.sequences]

    @property
    def labels(self) -> list[float]:
        """One entry for each positive and negative, none for an anchor: [label, 0.0, ...] a group."""
        return [x for group in self.groups for x in (group.label, *[0.0] * len(group.negatives))]

    def to_json(self) -> str:
        """One line of JSON that ``from_json`` reads back to an equal case; defaults are left out."""
        return json.dumps(_told(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Raises CaseError with what is missing or unknown."""
        try:
            raw = json.loads(text)
            return cls(
                groups=tuple(_group(g) for g in raw["groups"]),
                rows=Rows(**raw.get("rows", {})),
                stream=Stream(**_tuples(raw.get("stream", {}), "order")),
                options=Options(**_options(raw.get("options", {}))),
                model=raw.get("model", cls.model),
                seed=raw.get("seed", cls.seed),
                images=tuple(_grid(grid) for grid in raw.get("images", ())),
                mesh=Mesh(**raw.get("mesh", {})),
            )
        except json.JSONDecodeError as error:
            raise CaseError(f"not JSON: {error}") from error
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, CaseError):
                raise
            raise CaseError(f"not a case: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Case:
        """The case in a file."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def from_lengths(
    groups: Sequence[Sequence[int]],
    vocabulary: int = 128,
    first: int = 3,
    alike: bool = False,
    end: int | None = None,
    **rest: Any,
) -> Case:
    """A case from lengths alone, [anchor, positive, negatives...] a group; neighbouring tokens differ.

    first: the lowest id in use. alike: every sequence begins with the same tokens. end: the id that closes every
    sequence.
    """
    count = sum(sum(lengths) for lengths in groups)
    ids = distinct_ids(count, vocabulary, first)
    stream = iter(ids)
    take = [
        [tuple(ids[:length] if alike else (next(stream) for _ in range(length))) for length in lengths]
        for lengths in groups
    ]
    if end is not None:
        take = [[(*ids[:-1], end) for ids in sequences] for sequences in take]
    for g, sequences in enumerate(take):
        if len(sequences) < 2:
            raise CaseError(f"group {g} has {len(sequences)} sequences; it needs an anchor and a positive")
    return Case(tuple(Group(s[0], s[1], tuple(s[2:])) for s in take), **rest)


def from_parts(groups: Sequence[Sequence[Sequence[int | Grid]]], vocabulary: int = 128, **rest: Any) -> Case:
    """A case whose sequences are parts: a number is so many tokens of text, a triple an image of so many patches."""
    stream = iter(distinct_ids(sum(p for g in groups for s in g for p in s if isinstance(p, int)), vocabulary))
    images: list[Grid] = []

    def tokens(sequence: Sequence[int | Grid]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in sequence:
            if isinstance(part, int):
                ids += [next(stream) for _ in range(part)]
            else:
                images.append(part)
                ids += [IMAGE_ID] * (part[0] * part[1] * part[2] // PATCHES)
        return tuple(ids)

    take = [[tokens(sequence) for sequence in group] for group in groups]
    return Case(tuple(Group(s[0], s[1], tuple(s[2:])) for s in take), images=tuple(images), **rest)


def distinct_ids(count: int, vocabulary: int, first: int = 3) -> list[int]:
    """Token ids in which neighbours differ and each residue comes round before it repeats.

    Equal tokens hide faults. Ids below ``first`` (pad, end, unknown) are left out.
    """
    span = vocabulary - first
    stride = next(s for s in range(int(span * 0.618), span) if _coprime(s, span))
    return [first + (i * stride) % span for i in range(1, count + 1)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def grids(sequences: Sequence[Sequence[int]], images: Sequence[Grid]) -> list[list[Grid]]:
    """The images of each sequence: every run of IMAGE_ID is the next one.

    Raises CaseError where a run is not as long as its image, or there are too few or too many images.
    """
    taken, found = 0, []
    for i, ids in enumerate(sequences):
        own = []
        for token, run in groupby(ids):
            if token != IMAGE_ID:
                continue
            if taken == len(images):
                raise CaseError(f"sequence {i} holds image tokens, but all {taken} images are used up")
            length, (frames, height, width) = len(list(run)), images[taken]
            if length * PATCHES != frames * height * width or height % 2 or width % 2:
                raise CaseError(
                    f"sequence {i}: {length} image tokens do not fit image {taken} of {images[taken]} patches, "
                    f"{PATCHES} to a token"
                )
            own.append(images[taken])
            taken += 1
        found.append(own)
    if taken < len(images):
        raise CaseError(f"{len(images)} images for {taken} runs of the image token")
    return found


def _told(value: Any) -> Any:
    """A dataclass as a dictionary of what is not its default."""
    if isinstance(value, tuple):
        return [_told(each) for each in value]
    if not is_dataclass(value):
        return value
    found = {}
    for each in fields(value):
        own = getattr(value, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if own != default:
            found[each.name] = _told(own)
    return found


def _grid(raw: Sequence[int]) -> Grid:
    frames, height, width = raw
    return int(frames), int(height), int(width)


def _names(group: Group) -> list[str]:
    return ["anchor", "positive", *(f"negative {i}" for i in range(len(group.negatives)))]


def _group(raw: dict[str, Any]) -> Group:
    unknown = set(raw) - {"anchor", "positive", "negatives", "label"}
    if unknown:
        raise CaseError(f"not a case: unknown group fields {sorted(unknown)}")
    negatives = tuple(tuple(n) for n in raw.get("negatives", ()))
    return Group(tuple(raw["anchor"]), tuple(raw["positive"]), negatives, raw.get("label", 1.0))


def _options(raw: dict[str, Any]) -> dict[str, Any]:
    pairs = tuple((int(dimensions), float(weight)) for dimensions, weight in raw.get("matryoshka", ()))
    return {**raw, "matryoshka": pairs}


def _tuples(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: tuple(v) if k in names and v is not None else v for k, v in raw.items()}
