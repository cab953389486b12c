"""The implementation as the suite drives it: one object with every surface it offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import attention, cache, distributed, encoder, losses, packing

PAIRS = {
    "cosine_similarity": losses.cosine_similarity,
    "contrastive": losses.contrastive,
    "online_contrastive": losses.online_contrastive,
}


class PaddingFree:
    """Boundaries, encode, loss and step; ``backend`` None chooses by device and dtype."""

    name = "impl"

    def __init__(self, backend: str | None = None):
        self.backend = backend

    def boundaries(self, position_ids: Tensor | None = None, **given: Any) -> list[int]:
        """See ``impl.packing.boundaries``."""
        return packing.boundaries(position_ids, **given)

    def pack(self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any) -> packing.Packed:
        """Builds the stream that ``layout`` asks for, slots and all, and takes the slots out again."""
        first = _first_position(model)
        count = len(sequences)
        order = range(count) if layout.order is None else layout.order
        plain = packing.pack(sequences, list(order), first, model.config.vocab_size)
        if layout.tail == layout.each == 1:
            return plain
        ids, positions = _with_slots(plain, layout.each, layout.tail, layout.junk, model.config.vocab_size)
        compact = packing.from_stream(ids, positions, plain.lengths, first)
        return packing.Packed(compact.input_ids, compact.position_ids, compact.cu_seqlens, compact.lengths, plain.order)

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """Embeddings [n, d] in the sequences' order."""
        return encoder.encode(model, self.pack(model, sequences, layout), pooling, self.backend)

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """The loss that ``options`` ask for."""
        if options.loss in PAIRS:
            return PAIRS[options.loss](embeddings, labels)
        if options.matryoshka:
            return losses.matryoshka(_infonce(options), embeddings, labels, options.matryoshka)
        return _infonce(options)(embeddings, labels)

    def chunked_loss(self, embeddings: Tensor, labels: Sequence[float], options: Any, chunk: int) -> Tensor:
        """``loss`` with ``chunk`` anchors at a time."""
        return replace(_infonce(options), chunk=chunk)(embeddings, labels)

    def rank_loss(
        self, embeddings: Tensor, labels: Sequence[float], options: Any, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        """The loss over all ranks' groups, from one rank's rows."""
        mine = torch.tensor(labels, dtype=embeddings.dtype)
        return distributed.infonce(_infonce(options), embeddings, mine, group, mean_of_ranks)

    def cached_step(self, model: PreTrainedModel, case: Any, size: int) -> SimpleNamespace:
        """``step`` by a gradient cache, ``size`` sequences at a time."""
        sequences = case.sequences
        batches = [sequences[start : start + size] for start in range(0, len(sequences), size)]
        first = _first_position(model)

        def embed(batch: Sequence[Sequence[int]]) -> Tensor:
            packed = packing.pack(batch, first_position=first, vocabulary=model.config.vocab_size)
            return encoder.encode(model, packed, case.options.pooling, self.backend)

        model.zero_grad()
        loss, embeddings = cache.cached_backward(embed, batches, lambda e: self.loss(e, case.labels, case.options))
        gradients = _taken_gradients(model)
        return SimpleNamespace(embeddings=embeddings, loss=loss, gradients=gradients)

    def step(self, model: PreTrainedModel, case: Any) -> SimpleNamespace:
        """One training step: embeddings, loss, gradients by name, input gradients by sequence."""
        packed = self.pack(model, case.sequences, case.stream)
        added: list[Tensor] = []

        def probe(module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
            added.append(torch.zeros_like(output, requires_grad=True))
            return output + added[0]

        handle = model.get_input_embeddings().register_forward_hook(probe)
        try:
            embeddings = encoder.encode(model, packed, case.options.pooling, self.backend)
        finally:
            handle.remove()
        loss = self.loss(embeddings, case.labels, case.options)
        model.zero_grad()
        loss.backward()
        gradients = _taken_gradients(model)
        assert added[0].grad is not None
        inputs = packed.unpack(added[0].grad[0])
        return SimpleNamespace(
            embeddings=embeddings.detach(), loss=loss.detach(), gradients=gradients, input_gradients=inputs
        )

    def backends(self) -> dict[str, int]:
        """Which attention back ends ran so far, and in how many layers."""
        return dict(attention.ran)


def _taken_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters' gradients by name, which the model no longer holds."""
    taken = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


def _infonce(options: Any) -> losses.InfoNCE:
    return losses.InfoNCE(
        temperature=options.temperature,
        use_batch=options.use_batch,
        hard_negatives=options.hard_negatives,
        resample_seed=options.resample_seed,
        mask_fake_negative=options.mask_fake_negative,
        fake_negative_margin=options.fake_negative_margin,
        include_qq=options.include_qq,
        include_dd=options.include_dd,
        paper=options.loss == "qwen3",
    )


def _first_position(model: PreTrainedModel) -> int:
    """RoBERTa's absolute positions start after the pad id's; everybody else's at 0."""
    return model.config.pad_token_id + 1 if "roberta" in model.config.model_type else 0


def _with_slots(packed: packing.Packed, each: int, tail: int, junk: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The stream with slots after every sequence to a multiple of ``each`` and at the end of ``tail``."""
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    generator = torch.Generator().manual_seed(junk)

    def add_slots(count: int) -> None:
        ids.append(torch.randint(vocabulary, (count,), generator=generator))
        positions.append(torch.full((count,), packing.SLOT))

    pieces = zip(
        packed.input_ids.split(list(packed.lengths)), packed.position_ids.split(list(packed.lengths)), strict=True
    )
    for tokens, places in pieces:
        ids.append(tokens)
        positions.append(places)
        add_slots(-len(tokens) % each)
    add_slots(-sum(len(piece) for piece in ids) % tail)
    return torch.cat(ids), torch.cat(positions)
