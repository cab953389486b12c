"""What faulty implementations have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import Packed, PaddingFree, attention, encoder
from oracle import reference
from oracle.case import Rows
from oracle.layout import PaddedRows, padded_rows
from oracle.models import VOCABULARY

Sequences = Sequence[Sequence[int]]


def finished(model: PreTrainedModel, embeddings: Tensor, loss: Tensor) -> SimpleNamespace:
    """Runs backward and takes the gradients out of the model."""
    model.zero_grad()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return SimpleNamespace(embeddings=embeddings.detach(), loss=loss.detach(), gradients=gradients)


def unit(vectors: Tensor) -> Tensor:
    """Each row over its length."""
    return torch.nn.functional.normalize(vectors, dim=-1, eps=1e-12)


def merged(packed: Packed) -> Packed:
    """The stream as one sequence, for whom it concerns."""
    whole = len(packed.input_ids)
    return replace(packed, lengths=(whole,), order=(0,), cu_seqlens=torch.tensor([0, whole], dtype=torch.int32))


class Encoding(PaddingFree):
    """Faults of the encoder: ``embed`` is wrong somewhere."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        return encoder.encode(model, packed, pooling, self.backend)

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        return self.embed(model, self.pack(model, sequences, layout), pooling)

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        embeddings = self.encode(model, case.sequences, case.stream, case.options.pooling)
        return finished(model, embeddings, self.loss(embeddings, case.labels, case.options))


class Backend(Encoding):
    """Faults of attention: ``attend`` is wrong somewhere, with the arguments of ``impl.attention.sdpa``."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: tuple[int, int], scale: float) -> Tensor:
        raise NotImplementedError

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        attention.register("planted", self.attend)
        return encoder.encode(model, packed, pooling, "planted")


def attention_by_mask(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """softmax(q k^T scale) v over a whole stream [T, h, d], keys hidden where ``seen`` [T, T] is False."""
    grouped = q.shape[1] != k.shape[1]
    qs, ks, vs = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(qs, ks, vs, seen, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def owners(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sequence, and place within it, of every token of a stream."""
    sizes = torch.tensor(list(lengths))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return owner, torch.cat([torch.arange(length) for length in lengths])


def in_window(at: Tensor, window: tuple[int, int]) -> Tensor:
    """[T, T]: whether a key's place lies in a query's window."""
    left, right = window
    distance = at[None, :] - at[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool) if left < 0 else distance >= -left
    return seen if right < 0 else seen & (distance <= right)


class Padded(PaddingFree):
    """A trainer's padded side, offered as the implementation: rows, hidden states, vectors.

    Right as it stands: a test holds it against every law it can be judged by.
    """

    side = "right"

    def rows(self, model: PreTrainedModel, sequences: Sequences) -> PaddedRows:
        config = model.config.get_text_config()
        first = config.pad_token_id + 1 if "roberta" in config.model_type else 0
        return padded_rows(sequences, Rows(self.side, 1), VOCABULARY, config.pad_token_id or 0, first)

    def hidden(self, model: PreTrainedModel, batch: PaddedRows) -> Tensor:
        return reference.padded_hidden(model, batch)

    def vectors(self, hidden: Tensor, batch: PaddedRows, pooling: str) -> Tensor:
        return reference.pool(hidden, batch, pooling)

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        batch = self.rows(model, sequences)
        return unit(self.vectors(self.hidden(model, batch), batch, pooling))

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        embeddings = self.encode(model, case.sequences, case.stream, case.options.pooling)
        return finished(model, embeddings, self.loss(embeddings, case.labels, case.options))
