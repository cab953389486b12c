"""The founding report's batch: 2 groups of an anchor, a positive and 256 negatives, from real text."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from oracle import losses, reference
from oracle.case import Case, Group, Rows
from oracle.contract import declines, offers, own_line, training_step
from oracle.exact import exact
from oracle.models import VOCABULARY, tiny
from oracle.outcome import Outcome, compare

GROUPS = 2
NEGATIVES = 256
LONGEST = 24


@dataclass(frozen=True)
class Pair:
    """A query and the passage that answers it."""

    query: str
    passage: str


@cache
def retrieval_set() -> tuple[Pair, ...]:
    """The project's own retrieval set: queries with passages, English and Chinese."""
    text = resources.files("oracle").joinpath("retrieval.jsonl").read_text(encoding="utf-8")
    return tuple(Pair(**json.loads(line)) for line in text.splitlines())


def pieces(text: str) -> list[str]:
    """Words, single Chinese characters, numbers and marks: what a small model takes for tokens."""
    return re.findall(r"[\u4e00-\u9fff]|[A-Za-z]+|\d+|[^\sA-Za-z\d]", text)


def tokens(text: str, vocabulary: int = VOCABULARY, first: int = 3) -> tuple[int, ...]:
    """A text's pieces as ids from ``first`` up: a hash, since a model with random weights reads nothing."""
    return tuple(first + zlib.crc32(piece.lower().encode()) % (vocabulary - first) for piece in pieces(text))


def founding_texts() -> list[list[str]]:
    """Two groups of texts: a query, its passage's first sentence, and 256 short hard negatives.

    The negatives are phrases of the other passages, single words among them, cut at ``LONGEST`` tokens;
    no phrase occurs twice in a group.
    """
    pairs = retrieval_set()
    chosen = [pairs[0], pairs[len(pairs) // 2]]
    phrases = _phrases([pair.passage for pair in pairs if pair not in chosen])
    groups = []
    for g, pair in enumerate(chosen):
        negatives = phrases[g::GROUPS][:NEGATIVES]
        groups.append([pair.query, _phrases([pair.passage])[0], *negatives])
    return groups


def _phrases(passages: list[str]) -> list[str]:
    """Distinct clauses and words of the passages, in a fixed order that mixes lengths."""
    found: dict[str, None] = {}
    for passage in passages:
        for clause in re.split(r"[.;,:()\u3002\uff0c\uff1b\uff1a]", passage):
            parts = pieces(clause)
            if 1 <= len(parts) <= LONGEST:
                found.setdefault(clause.strip())
            found.update(dict.fromkeys(part for part in parts[::7] if part.isalpha()))
    return sorted(found, key=lambda phrase: zlib.crc32(phrase.encode()))


@cache
def founding_case(model: str = "qwen3") -> Case:
    """The batch as a case: 516 sequences, 514 labels."""
    groups = []
    for texts in founding_texts():
        anchor, positive, *negatives = (tokens(text) for text in texts)
        groups.append(Group(anchor, positive, tuple(negatives)))
    return Case(tuple(groups), model=model)


@dataclass(frozen=True)
class FoundingResult:
    """What became of the batch. agrees: None where nothing could be compared; told: one line."""

    agrees: bool | None
    told: str


def try_founding_batch(implementation: Any, model: str = "qwen3") -> FoundingResult:
    """The batch through the implementation, against padded rows: embeddings, loss, gradients."""
    case, small = founding_case(model), tiny(model)
    counted = f"{len(case.sequences)} sequences, {case.lengths.count(1)} of one token, {len(case.labels)} labels"
    if not (offers(implementation, "step") or offers(implementation, "encode")):
        return FoundingResult(None, f"founding batch ({counted}): neither step nor encode is offered")
    try:
        with exact():
            found = training_step(implementation, small, case)
    except Exception as error:
        if declines(error):
            return FoundingResult(None, f"founding batch ({counted}): declined")
        told = f"raised {type(error).__name__}: {error} {own_line(error)}"
        return FoundingResult(False, f"founding batch ({counted}): {told}")
    if len(found.embeddings) != len(case.sequences):
        return FoundingResult(False, f"founding batch ({counted}): {_misfit(found, case)}")
    with exact():
        expected = reference.step(small, case, Rows())
    difference = compare(expected, found)
    if difference:
        return FoundingResult(False, f"founding batch ({counted}): {difference}")
    same = f"{len(found.embeddings)} embeddings, the loss {found.loss.item():.6f}"
    return FoundingResult(
        True, f"founding batch ({counted}): {same} and {len(found.gradients)} gradients equal in every bit"
    )


def _misfit(found: Outcome, case: Case) -> str:
    try:
        losses.group_rows(case.labels, len(found.embeddings))
    except losses.LossInputError as error:
        return f"{len(found.embeddings)} embeddings came back, and a loss of {float(found.loss):.6f}. {error}"
    raise AssertionError("unreachable: another number of rows cannot fit the labels")
