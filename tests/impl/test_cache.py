"""The gradient cache: the plain gradients, dropout included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

import impl
from impl import cache
from impl.cache import cached_backward
from oracle import exact
from oracle.case import from_lengths

CASE = from_lengths([[3, 1, 7, 2], [1, 1], [5, 2, 1]])


def dropping() -> BertModel:
    """A small encoder that drops a quarter of its hidden units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=128,
            hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
        )  # fmt: skip
        return BertModel(config, add_pooling_layer=False).double().train()


def run(model: BertModel, size: int, cached: bool) -> tuple[Tensor, dict[str, Tensor], float]:
    """One step in mini-batches of ``size``: by the cache, or with all activations kept."""
    batches = [CASE.sequences[i : i + size] for i in range(0, len(CASE.sequences), size)]

    def embed(batch: Sequence[Any]) -> Tensor:
        return impl.encode(model, impl.pack(batch))

    def loss(embeddings: Tensor) -> Tensor:
        return impl.infonce(embeddings, CASE.labels)

    model.zero_grad()
    with torch.random.fork_rng(devices=[]), exact():
        torch.manual_seed(7)
        if cached:
            value, _ = cached_backward(embed, batches, loss)
        else:
            value = loss(torch.cat([embed(batch) for batch in batches]))
            value.backward()
        after = torch.rand(1).item()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return value.detach(), gradients, after


@pytest.mark.parametrize("size", [1, 2, 4, 9, 20])
def test_the_caches_gradients_are_the_plain_ones_with_dropout(size: int) -> None:
    model = dropping()
    plain_loss, plain, plain_state = run(model, size, cached=False)
    loss, found, state = run(model, size, cached=True)
    assert torch.equal(plain_loss, loss)
    assert state == plain_state, "the cache leaves another random state behind"
    assert plain.keys() == found.keys()
    for name in plain:
        assert torch.equal(plain[name], found[name]), name
    assert any(bool(g.any()) for g in plain.values())


def test_dropout_that_is_not_replayed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the second pass draws anew."""
    model = dropping()
    _, plain, _ = run(model, 4, cached=False)
    monkeypatch.setattr(cache, "_restore", lambda *states: None)
    _, found, _ = run(model, 4, cached=True)
    assert any(not torch.equal(plain[name], found[name]) for name in plain)


def test_dropout_does_something() -> None:
    model = dropping()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), exact():
        torch.manual_seed(1)
        first, second = (impl.encode(model, impl.pack(CASE.sequences)) for _ in range(2))
    assert not torch.equal(first, second)
