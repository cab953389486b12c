"""The implementation as the suite drives it: one object with every surface it offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import attention, cache, distributed, encoder, losses, multimodal, packing, sharding

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

    def boundaries(
        self,
        position_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        count: int | None = None,
    ) -> list[int]:
        """See ``impl.packing.boundaries``."""
        return packing.boundaries(position_ids, cu_seqlens=cu_seqlens, lengths=lengths, count=count)

    def pack(self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any) -> packing.Packed:
        """Builds the stream that ``layout`` asks for, slots and all, and takes the slots out again."""
        order = range(len(sequences)) if layout.order is None else layout.order
        plain = packing.pack(sequences, list(order), _first_position(model), _vocabulary(model))
        return _through_slots(plain, layout, model)

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """Embeddings [n, d] in the sequences' order."""
        return encoder.encode(model, self.pack(model, sequences, layout), pooling, self.backend)

    def encode_multimodal(
        self,
        model: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        images: Sequence[Sequence[Any]],
        layout: Any,
        pooling: str = "last",
    ) -> Tensor:
        """``encode`` of sequences with images."""
        order = list(range(len(sequences)) if layout.order is None else layout.order)
        grids = [[image.grid for image in own] for own in images]
        merge = model.config.vision_config.spatial_merge_size
        plain = multimodal.pack(sequences, grids, model.config.image_token_id, merge, order, _vocabulary(model))
        packed = _through_slots(plain, layout, model)
        inputs = {}
        if shown := multimodal.in_stream_order(packed, images):
            inputs["pixel_values"] = torch.cat([image.patches for image in shown])
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in shown])
        return encoder.encode(model, packed, pooling, self.backend, inputs)

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """See ``impl.packing.unpack``."""
        return packing.unpack(values, position_ids, lengths)

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
            packed = packing.pack(batch, first_position=first, vocabulary=_vocabulary(model))
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
            return output + added[-1]

        handle = model.get_input_embeddings().register_forward_hook(probe)
        try:
            embeddings = encoder.encode(model, packed, case.options.pooling, self.backend)
        finally:
            handle.remove()
        loss = self.loss(embeddings, case.labels, case.options)
        model.zero_grad()
        loss.backward()
        gradients = _taken_gradients(model)
        # One call of the model for each piece of the stream.
        inputs = packed.unpack(torch.cat([piece.grad[0] for piece in added if piece.grad is not None]))
        return SimpleNamespace(
            embeddings=embeddings.detach(), loss=loss.detach(), gradients=gradients, input_gradients=inputs
        )

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        """See ``impl.sharding.Plan.split``."""
        return sharding.Plan(tuple(lengths), ulysses, ring).split(field, dim, fill)

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        """See ``impl.sharding.Plan.gather``."""
        return sharding.Plan(tuple(lengths), ulysses, ring).gather(shards, dim)

    def sharded_attention(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ulysses: int, ring: int, causal: bool
    ) -> Tensor:
        """Attention [T, h, d] over simulated ranks."""
        wire = sharding.Simulated(sharding.Plan(tuple(lengths), ulysses, ring))
        shares = [(q[held], k[held], v[held]) for held in wire.plan.tokens]
        window = (-1, 0 if causal else -1)
        return wire.plan.collected(sharding.sharded_attention(wire, shares, window, q.shape[-1] ** -0.5, False))

    def sharded_step(self, model: PreTrainedModel, case: Any, groups: Any, streaming: bool = False) -> SimpleNamespace:
        """One rank's part of a step."""
        ranks = sharding.Ranks(groups.ulysses, groups.ring, groups.sequence, groups.data)
        packed = self.pack(model, case.sequences, case.stream)
        embeddings = sharding.encode(model, packed, ranks, case.options.pooling, streaming)
        labels = torch.tensor(case.labels, dtype=embeddings.dtype)
        loss = sharding.loss(_infonce(case.options), embeddings, labels, ranks)
        model.zero_grad()
        loss.backward()
        return SimpleNamespace(embeddings=embeddings, loss=loss, gradients=_taken_gradients(model))

    def streaming_step(self, model: PreTrainedModel, case: Any, groups: Any) -> SimpleNamespace:
        """``sharded_step`` with a running log-sum-exp."""
        return self.sharded_step(model, case, groups, streaming=True)

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


def _vocabulary(model: PreTrainedModel) -> int:
    size: int = model.config.get_text_config().vocab_size
    return size


def _through_slots(plain: packing.Packed, layout: Any, model: PreTrainedModel) -> packing.Packed:
    """The stream that ``layout`` asks for, slots and all, and the slots taken out again."""
    if layout.tail == layout.each == 1:
        return plain
    ids, positions = _with_slots(plain, layout, _vocabulary(model))
    compact = packing.from_stream(ids, positions, plain.lengths, _first_position(model))
    return replace(compact, order=plain.order)


def _with_slots(packed: packing.Packed, layout: Any, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids and positions with slots after every sequence and at the end, as ``layout`` says."""
    generator = torch.Generator().manual_seed(layout.junk)
    ids: list[Tensor] = []
    positions: list[Tensor] = []

    def add_slots(numbers: Tensor) -> None:
        junk = torch.randint(vocabulary, (len(numbers),), generator=generator)
        ids.append(junk if layout.slot is None else torch.full_like(junk, layout.slot))
        positions.append(numbers.expand(*packed.position_ids.shape[:-1], -1))

    lengths = list(packed.lengths)
    for tokens, places in zip(packed.input_ids.split(lengths), packed.position_ids.split(lengths, -1), strict=True):
        ids.append(tokens)
        positions.append(places)
        add_slots(torch.full((-len(tokens) % layout.each,), packing.SLOT))
    missing = -sum(map(len, ids)) % layout.tail
    kinds = {"slots": torch.full((missing,), packing.SLOT), "counted": torch.arange(missing)}
    add_slots(kinds.get(layout.pads, torch.zeros(missing, dtype=torch.int64)))
    return torch.cat(ids), torch.cat(positions, dim=-1)
