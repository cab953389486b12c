"""Right hidden states, and a vector read at the wrong place, of the wrong length, or too often."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import Packed, encoder
from oracle.case import Stream
from tests.faults.base import Encoding, Sequences, unit
from tests.faults.catalogue import planted

EMBEDDINGS = "agreement.embeddings_equal_the_padded_ones"
POOLINGS = "agreement.every_pooling_equals_the_padded_one"
COUNT = "agreement.every_sequence_has_one_embedding"


class _Pooled(Encoding):
    """Faults of ``at``: which token of the stream [n] stands for a sequence, in the caller's order."""

    def at(self, model: PreTrainedModel, packed: Packed) -> Tensor:
        raise NotImplementedError

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        if pooling != "last":
            return super().embed(model, packed, pooling)
        return unit(encoder.hidden_states(model, packed, self.backend)[self.at(model, packed)])


def _starts(packed: Packed) -> Tensor:
    return packed.cu_seqlens[:-1].long()[torch.tensor(packed.places)]


@planted("isolation.order_does_not_matter", smallest=[1, 1])
class StreamOrder(_Pooled):
    """Embeddings come back as they stand in the stream, not as they were given."""

    def at(self, model: PreTrainedModel, packed: Packed) -> Tensor:
        return packed.cu_seqlens[1:].long() - 1


@planted(EMBEDDINGS, "EleutherAI/gpt-neox/pull/1285", smallest=[1, 2])
class SecondLastPooled(_Pooled):
    """The token before the last one is pooled, as if an end token had been counted twice."""

    def at(self, model: PreTrainedModel, packed: Packed) -> Tensor:
        return torch.maximum(packed.last_tokens() - 1, _starts(packed))


@planted("agreement.the_last_token_is_pooled", smallest=[1, 2])
class FirstTokenPooled(_Pooled):
    """CLS pooling where last-token pooling was asked for."""

    def at(self, model: PreTrainedModel, packed: Packed) -> Tensor:
        return _starts(packed)


@planted(EMBEDDINGS, "huggingface/transformers/issues/35352")
class FirstPadById(_Pooled):
    """The last token is the one before the first pad id, wherever that id stands in the text."""

    def at(self, model: PreTrainedModel, packed: Packed) -> Tensor:
        pad = model.config.get_text_config().pad_token_id
        found = []
        for start, end in zip(_starts(packed).tolist(), packed.last_tokens().tolist(), strict=True):
            pads = (packed.input_ids[start : end + 1] == pad).nonzero().flatten().tolist()
            found.append(max(start, start + pads[0] - 1) if pads else end)
        return torch.tensor(found)


@planted(EMBEDDINGS, smallest=[1, 2])
class LongestsLastPooled(_Pooled):
    """Every sequence is read where the first one of its stream ends, as in a batch of equal lengths."""

    def at(self, model: PreTrainedModel, packed: Packed) -> Tensor:
        return torch.minimum(_starts(packed) + packed.lengths[0] - 1, packed.last_tokens())


class _Changed(Encoding):
    """Faults of ``changed``: the texts that are embedded instead of those given."""

    def changed(self, sequences: Sequences) -> list[list[int]]:
        raise NotImplementedError

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        return super().encode(model, self.changed(sequences), layout, pooling)


@planted("agreement.embeddings_equal_each_sequence_alone", smallest=[1, 2])
@planted("agreement.a_training_step_equals_the_padded_one")
class FirstTokenDropped(_Changed):
    """A sequence of several tokens loses its first one."""

    def changed(self, sequences: Sequences) -> list[list[int]]:
        return [list(ids[1:]) or list(ids) for ids in sequences]


@planted(EMBEDDINGS, "eastriverlee/LLM.swift/pull/87", smallest=[1, 2])
class TrailingSpecialDropped(_Changed):
    """A special token at the end, on which the embedding sits, is cut off before the model runs."""

    def changed(self, sequences: Sequences) -> list[list[int]]:
        return [list(ids[:-1]) if len(ids) > 1 and ids[-1] < 3 else list(ids) for ids in sequences]


@planted(EMBEDDINGS, "embeddings-benchmark/mteb/issues/3217", smallest=[1, 33])
class EndTruncated(_Changed):
    """The end token is appended to the text and cut off with it, at 32 tokens."""

    def changed(self, sequences: Sequences) -> list[list[int]]:
        return [list(ids[:32]) for ids in sequences]


@planted(COUNT, "huggingface/trl/issues/5075", smallest=[1, 17])
class FragmentsQueuedAgain(Encoding):
    """What goes beyond 16 tokens becomes a text of its own."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        pieces = list(chain.from_iterable([ids[i : i + 16] for i in range(0, len(ids), 16)] for ids in sequences))
        order = layout.order if len(pieces) == len(sequences) else None
        return super().encode(model, pieces, Stream(order, layout.tail, layout.each, layout.junk), pooling)


@planted(COUNT, "vllm-project/vllm/pull/41049", smallest=[1, 33])
class TwoPlaceholders(Encoding):
    """A text of more than 32 tokens leaves two places in the list of outputs."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        found = super().encode(model, sequences, layout, pooling)
        return torch.cat([found[i : i + 1].repeat(1 + (len(ids) > 32), 1) for i, ids in enumerate(sequences)])


@planted(COUNT, "meta-pytorch/torchtune/issues/1689", smallest=[1, 31])
class TwiceTheLimitRaises(Encoding):
    """A text of more than twice the pack's 15 tokens cannot be split, and stops the run."""

    def encode(self, model: PreTrainedModel, sequences: Sequences, layout: Any, pooling: str = "last") -> Tensor:
        longest = max(map(len, sequences))
        if longest > 30:
            raise ValueError(f"split_with_sizes expects split_sizes to sum exactly to 15, got {longest}")
        return super().encode(model, sequences, layout, pooling)


@planted("isolation.number_does_not_matter", "pytorch/pytorch/issues/130196", smallest=[1, 1])
class OneTokenLosesAnAxis(Encoding):
    """A single sequence of one token gives an output with one axis less."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        found = super().embed(model, packed, pooling)
        return found[0] if packed.lengths == (1,) else found


@planted(COUNT, smallest=[1, 1])
class NotNormalised(Encoding):
    """The pooled vectors themselves."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        return encoder.pool(encoder.hidden_states(model, packed, self.backend), packed, pooling)


@planted(COUNT, "tensorflow/similarity/issues/237", smallest=[1, 1])
class NormalisedByTheBatch(Encoding):
    """The norm is taken over all axes: every vector is divided by the batch's."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        vectors = encoder.pool(encoder.hidden_states(model, packed, self.backend), packed, pooling)
        return vectors / vectors.norm()


@planted(POOLINGS, smallest=[1, 2])
class EveryTokenWeighsTheSame(Encoding):
    """The mean where the position-weighted mean was asked for."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        return super().embed(model, packed, "mean" if pooling == "weighted_mean" else pooling)


@planted(POOLINGS)
class BoundaryCountedTwice(Encoding):
    """A mean takes in the following sequence's first token."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        if pooling not in ("mean", "mean_sqrt_len"):
            return super().embed(model, packed, pooling)
        pieces = packed.unpack(encoder.hidden_states(model, packed, self.backend))
        following = [pieces[(i + 1) % len(pieces)][0] for i in range(len(pieces))]
        return unit(torch.stack([(p.sum(dim=0) + f) / (len(p) + 1) for p, f in zip(pieces, following, strict=True)]))


@planted(POOLINGS, "google/tunix/pull/1662", smallest=[1, 1])
class MeanOverThePack(Encoding):
    """The mean knows the pack's row alone, and takes all its sequences for one."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        if pooling != "mean":
            return super().embed(model, packed, pooling)
        states = encoder.hidden_states(model, packed, self.backend)
        return unit(states.sum(dim=0) / len(states)).expand(len(packed.lengths), -1)


@planted(POOLINGS, smallest=[1, 1])
class MaximumOfMagnitudes(Encoding):
    """The maximum starts from zeros: no dimension can come out negative."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        if pooling != "max":
            return super().embed(model, packed, pooling)
        pieces = packed.unpack(encoder.hidden_states(model, packed, self.backend))
        return unit(torch.stack([piece.amax(dim=0).clamp(min=0) for piece in pieces]))
