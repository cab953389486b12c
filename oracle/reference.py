"""The reference: a Hugging Face model on padded rows, by definition.

Eager attention, positions from the mask, pooling by length, one loss, one backward. Nothing is packed,
nothing is recovered, nothing is clever. Run it under ``oracle.exact()`` and it can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oracle import losses
from oracle.case import Case, Rows
from oracle.images import Images, grids_of, images_of, model_inputs
from oracle.layout import PaddedRows, padded_rows
from oracle.models import input_embeddings, kind
from oracle.outcome import Outcome

Sequences = Sequence[Sequence[int]]


class InputError(ValueError):
    """Input the reference cannot take; names the sequence, id or parameter."""


def check_model(model: nn.Module) -> None:
    """Refuses a model that is not in float64 throughout, naming the first parameter."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float64:
            raise InputError(f"{name} is {parameter.dtype}; exactness needs float64: call model.double()")


def check_sequences(model: PreTrainedModel, sequences: Sequences) -> None:
    """Refuses an empty batch, an empty sequence and ids outside the vocabulary, by index."""
    vocabulary = model.config.get_text_config().vocab_size
    if not sequences:
        raise InputError("the batch is empty")
    for i, ids in enumerate(sequences):
        if len(ids) == 0:
            raise InputError(f"sequence {i} is empty; an empty sequence has no embedding")
        for at, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                raise InputError(f"sequence {i} holds the id {token} at {at}; the vocabulary has {vocabulary}")


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation and no cache, for a while.

    A cache, transformers' default, switches off parts of its masking.
    """
    config = model.config.get_text_config()
    before, cached = model.config._attn_implementation, getattr(config, "use_cache", None)
    model.set_attn_implementation(name)
    if cached is not None:
        config.use_cache = False
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        if cached is not None:
            config.use_cache = cached


def padded_hidden(model: PreTrainedModel, batch: PaddedRows, images: Images | None = None) -> Tensor:
    """The last hidden states [n, width, d] of padded rows, which may hold images."""
    with attention(model, "eager"):
        output = model(
            input_ids=batch.input_ids.to(model.device),
            attention_mask=batch.attention_mask.to(model.device),
            position_ids=batch.position_ids.to(model.device),
            **model_inputs(images),
        )
    hidden: Tensor = output.last_hidden_state
    return hidden


def pool(hidden: Tensor, batch: PaddedRows, pooling: str) -> Tensor:
    """One vector a row: [n, width, d] -> [n, d]; as in sentence-transformers' Pooling."""
    if pooling == "last":  # pool_one for all rows at once
        return hidden[torch.arange(len(hidden)), torch.tensor(batch.last)]
    rows = [
        pool_one(hidden[i, a : b + 1], pooling) for i, (a, b) in enumerate(zip(batch.first, batch.last, strict=True))
    ]
    return torch.stack(rows)


def pool_one(states: Tensor, pooling: str) -> Tensor:
    """The vector [d] of one sequence's real hidden states [length, d]."""
    length = len(states)
    if pooling == "last":
        return states[length - 1]
    if pooling == "cls":
        return states[0]
    if pooling == "max":
        return states.amax(dim=0)
    if pooling == "mean":
        return states.sum(dim=0) / length
    if pooling == "mean_sqrt_len":
        return states.sum(dim=0) / torch.tensor(float(length), dtype=torch.float64).sqrt()
    if pooling == "weighted_mean":  # the token at position i (from 0) has weight i + 1
        weights = torch.arange(1, length + 1, device=states.device).unsqueeze(1)
        return (states * weights).sum(dim=0) / int(weights.sum())
    raise InputError(f"no pooling {pooling!r}")


def normalise(vectors: Tensor) -> Tensor:
    """Each row over its L2 norm (at least 1e-12; a zero row stays zero)."""
    return torch.nn.functional.normalize(vectors, dim=-1, eps=1e-12)


def encode(
    model: PreTrainedModel,
    sequences: Sequences,
    layout: Rows | None = None,
    pooling: str = "last",
    first_position: int = 0,
    images: Images | None = None,
) -> Tensor:
    """Embeddings [n, d] of the sequences on padded rows; ``layout`` None: each sequence alone, no pads.

    images: of each sequence, for a model that takes them.
    """
    check_sequences(model, sequences)
    if layout is None:
        alone = [None] * len(sequences) if images is None else [[own] for own in images]
        return torch.cat(
            [encode(model, [s], Rows(), pooling, first_position, i) for s, i in zip(sequences, alone, strict=True)]
        )
    config = model.config.get_text_config()
    ordinary = getattr(model.config, "image_token_id", config.vocab_size)  # pads must not look like images
    batch = padded_rows(sequences, layout, ordinary, config.pad_token_id or 0, first_position, grids_of(images))
    return normalise(pool(padded_hidden(model, batch, images), batch, pooling))


def step(model: PreTrainedModel, case: Case, layout: Rows | None = None) -> Outcome:
    """One training step on padded rows (``layout``; None: each sequence alone), gradients and all."""
    check_model(model)
    first, images = kind(case.model).first_position, images_of(case) if case.images else None
    with input_probe(model) as probe:
        embeddings = encode(model, case.sequences, layout, case.options.pooling, first, images)
        loss = losses.loss(embeddings, case.labels, case.options)
        model.zero_grad()
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Outcome(embeddings.detach(), loss.detach(), gradients, _input_gradients(probe, case, layout))


def _input_gradients(probe: list[Tensor], case: Case, layout: Rows | None) -> list[Tensor]:
    """The probes' gradients cut to each sequence's real tokens."""
    if layout is None:
        return [added.grad[0] for added in probe if added.grad is not None]
    batch = padded_rows(case.sequences, layout, 1)
    (added,) = probe
    assert added.grad is not None
    return [row[a : b + 1] for row, a, b in zip(added.grad, batch.first, batch.last, strict=True)]


@contextmanager
def input_probe(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Adds a zero tensor to every output of the input embeddings; its gradient is theirs."""
    added: list[Tensor] = []

    def add_zero(module: nn.Module, args: object, output: Tensor) -> Tensor:
        added.append(torch.zeros_like(output, requires_grad=True))
        return output + added[-1]

    handle = input_embeddings(model).register_forward_hook(add_zero)
    try:
        yield added
    finally:
        handle.remove()
