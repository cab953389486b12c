"""The padded side is the wrong one: as an implementation that pads, or in the reference itself."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import PaddingFree
from oracle import reference
from oracle.layout import PaddedRows, padded_rows
from tests.faults.base import Padded, Sequences
from tests.faults.catalogue import planted

EMBEDDINGS = "agreement.embeddings_equal_the_padded_ones"
POOLINGS = "agreement.every_pooling_equals_the_padded_one"


@planted(EMBEDDINGS, "lean-dojo/ReProver/issues/34", model="bert", smallest=[1, 1])
class MaskNotPassed(Padded):
    """The attention mask stays behind: pads are tokens like others."""

    def hidden(self, model: PreTrainedModel, batch: PaddedRows) -> Tensor:
        return reference.padded_hidden(model, replace(batch, attention_mask=torch.ones_like(batch.attention_mask)))


@planted(EMBEDDINGS, "AnswerDotAI/ModernBERT/pull/40", model="modernbert", smallest=[1, 1])
class SdpaWithoutMask(MaskNotPassed):
    """The sdpa path of the padded side drops the mask; the unpadded side is right."""


@planted(EMBEDDINGS, "unslothai/unsloth-zoo/pull/963", smallest=[1, 2])
class PaddingMaskForCausal(Padded):
    """A padding mask replaces the causal mask instead of joining it."""

    def hidden(self, model: PreTrainedModel, batch: PaddedRows) -> Tensor:
        keys = batch.attention_mask[:, None, None, :].bool().expand(-1, 1, batch.attention_mask.shape[1], -1)
        unseen = torch.zeros(keys.shape, dtype=model.dtype).masked_fill(~keys, torch.finfo(model.dtype).min)
        return reference.padded_hidden(model, replace(batch, attention_mask=unseen))


@planted(EMBEDDINGS, "unslothai/unsloth/pull/4078")
class SharedPositions(Padded):
    """One vector of positions serves all left-padded rows."""

    side = "left"

    def rows(self, model: PreTrainedModel, sequences: Sequences) -> PaddedRows:
        batch = super().rows(model, sequences)
        shared = torch.arange(batch.input_ids.shape[1]).expand_as(batch.position_ids)
        return replace(batch, position_ids=shared)


@planted(EMBEDDINGS, "opensearch-project/ml-commons/pull/4744", smallest=[1, 1])
class MaskSumMinusOne(Padded):
    """The last token stands at the number of real ones, less one; in a left-padded row that is a pad."""

    side = "left"

    def rows(self, model: PreTrainedModel, sequences: Sequences) -> PaddedRows:
        batch = super().rows(model, sequences)
        return replace(batch, last=[len(ids) - 1 for ids in sequences])


@planted(POOLINGS, "huggingface/sentence-transformers/pull/3275", smallest=[1, 1])
class MeanWithPads(Padded):
    """Token embeddings come untrimmed, and the mean takes in the pads."""

    def vectors(self, hidden: Tensor, batch: PaddedRows, pooling: str) -> Tensor:
        if pooling != "mean":
            return super().vectors(hidden, batch, pooling)
        return hidden.sum(dim=1) / hidden.shape[1]


@planted(EMBEDDINGS, "microsoft/onnxruntime-genai/pull/1694")
class EndMaskedById(Padded):
    """Whatever has the pad's id is masked, in the middle of a text too."""

    def hidden(self, model: PreTrainedModel, batch: PaddedRows) -> Tensor:
        pad = model.config.get_text_config().pad_token_id
        mask = batch.attention_mask * (batch.input_ids != pad)
        return reference.padded_hidden(model, replace(batch, attention_mask=mask))


@planted(POOLINGS, "spiceai/spiceai/pull/13416", smallest=[1, 1])
class TokenizerPads(Padded):
    """The tokenizer's own fixed padding comes in as text: pads are attended to, and in the mean."""

    def rows(self, model: PreTrainedModel, sequences: Sequences) -> PaddedRows:
        pad = model.config.get_text_config().pad_token_id
        longer = [[*ids, *[pad] * (70 - len(ids))] for ids in sequences]
        last = [len(ids) - 1 for ids in sequences]
        return replace(super().rows(model, longer), last=last)

    def vectors(self, hidden: Tensor, batch: PaddedRows, pooling: str) -> Tensor:
        return super().vectors(hidden, replace(batch, last=[69] * len(hidden)) if pooling == "mean" else batch, pooling)


@planted(EMBEDDINGS, "lablup/mlxcel/pull/1415", model="lfm2", smallest=[1, 1])
class PadsInTheConvolution(Padded):
    """A convolution has no keys to mask: pads before a text are in its window unless they are zeroed."""

    side = "left"

    def hidden(self, model: PreTrainedModel, batch: PaddedRows) -> Tensor:
        module = importlib.import_module("transformers.models.lfm2.modeling_lfm2")
        with mock.patch.object(module, "apply_mask_to_padding_states", lambda states, mask: states):
            return super().hidden(model, batch)


@planted("agreement.a_training_step_equals_the_padded_one", "pytorch/pytorch/pull/196170", smallest=[1, 1, 1])
class MaskedRowPoisonsGradients(Padded):
    """A row whose keys are all hidden gives NaN, which is dropped; zero times NaN comes back in every gradient."""

    def hidden(self, model: PreTrainedModel, batch: PaddedRows) -> Tensor:
        states = super().hidden(model, batch)
        nothing = torch.softmax(torch.full((1, states.shape[1]), -torch.inf, dtype=states.dtype), dim=-1)
        masked = (nothing @ states[0]).unsqueeze(0)
        return torch.cat([states, masked.unsqueeze(0).expand(1, *states.shape[1:])])[: len(states)]


@planted(EMBEDDINGS, "huggingface/transformers/issues/31035", smallest=[1, 1])
class PadsSeeEverything(Padded):
    """Rows of a mask that hide every key are opened altogether, and with them a left-padded text's first rows."""

    side = "left"

    def hidden(self, model: PreTrainedModel, batch: PaddedRows) -> Tensor:
        width = batch.attention_mask.shape[1]
        seen = torch.ones(width, width, dtype=torch.bool).tril() & batch.attention_mask[:, None, :].bool()
        half = torch.arange(width)[None, :] < torch.tensor(batch.first)[:, None] + 1
        opened = seen | half[:, :, None]
        unseen = torch.zeros(opened.shape, dtype=model.dtype).masked_fill(~opened, torch.finfo(model.dtype).min)
        return reference.padded_hidden(model, replace(batch, attention_mask=unseen.unsqueeze(1)))


# --- in the reference itself ------------------------------------------------------------------------


def _in_reference(name: str, value: Any) -> Any:
    return partial(mock.patch.object, reference, name, value)


_RIGHT_POOL = reference.pool


def _cut(hidden: Tensor, batch: PaddedRows, pooling: str) -> Tensor:
    before = [max(a, b - 1) for a, b in zip(batch.first, batch.last, strict=True)]
    return _RIGHT_POOL(hidden, replace(batch, last=before), pooling)


@planted(EMBEDDINGS, smallest=[1, 2], patch=_in_reference("pool", _cut))
class ReferencePoolsTheSecondLast(PaddingFree):
    """The reference pools the token before the last one, in rows of any padding and alone."""


def _from_one(*arguments: Any, **rest: Any) -> PaddedRows:
    batch = padded_rows(*arguments, **rest)
    return replace(batch, position_ids=batch.position_ids + batch.attention_mask)


@planted(EMBEDDINGS, model="bert", smallest=[1, 1], patch=_in_reference("padded_rows", _from_one))
class ReferenceCountsFromOne(PaddingFree):
    """The reference's positions begin at 1, in rows of any padding and alone."""
