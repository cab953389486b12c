"""One sequence reaches another, or a token sees what it must not: attention, convolution, recurrence."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from impl import Packed, attention, encoder, mixers
from tests.faults.base import (
    Backend,
    Encoding,
    attention_by_mask,
    in_window,
    merged,
    owners,
    unit,
)
from tests.faults.catalogue import planted

Window = tuple[int, int]
EMBEDDINGS = "agreement.embeddings_equal_the_padded_ones"
TOKENS = "isolation.other_sequences_tokens_do_not_matter"


def _last(states: Tensor, packed: Packed) -> Tensor:
    return unit(states[packed.last_tokens()])


# --- no boundaries ----------------------------------------------------------------------------------


@planted(TOKENS, "huggingface/nanoVLM/pull/204", smallest=[1, 1])
class NoBoundariesInAttention(Encoding):
    """Positions begin anew with every sequence, which is thought to isolate: attention takes the stream for one."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        return _last(encoder.hidden_states(model, merged(packed), self.backend), packed)


@planted("isolation.order_does_not_matter", "unslothai/unsloth/issues/1207", smallest=[1, 1])
class SimplyConcatenated(Encoding):
    """Texts one after another, nothing else: positions count on, attention takes the stream for one sequence."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        running = replace(merged(packed), position_ids=torch.arange(len(packed.input_ids)))
        return _last(encoder.hidden_states(model, running, self.backend), packed)


class _Transformers(Encoding):
    """transformers' own path on the packed row; ``given`` are further arguments of the model."""

    def given(self, packed: Packed) -> dict[str, Any]:
        raise NotImplementedError

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            output = model(
                input_ids=packed.input_ids.unsqueeze(0),
                position_ids=packed.position_ids.unsqueeze(0),
                **self.given(packed),
            )
        finally:
            model.set_attn_implementation(before)
        return unit(encoder.pool(output.last_hidden_state[0], packed, pooling))


@planted(TOKENS, "huggingface/transformers/pull/46634", smallest=[1, 1])
class AllOnesMask(_Transformers):
    """transformers looks for packed sequences where no mask is given; packing code gives one of ones."""

    def given(self, packed: Packed) -> dict[str, Any]:
        return {"attention_mask": torch.ones(1, len(packed.input_ids), dtype=torch.int64), "use_cache": False}


@planted(TOKENS, "areal-project/AReaL/issues/1442", smallest=[1, 1])
class OnlyFlashReadsCuSeqlens(_Transformers):
    """The mask is None and cu_seqlens are passed, which sdpa does not read; the cache hides the position ids."""

    def given(self, packed: Packed) -> dict[str, Any]:
        return {"cu_seq_lens_q": packed.cu_seqlens, "cu_seq_lens_k": packed.cu_seqlens, "use_cache": True}


@planted(TOKENS, "axolotl-ai-cloud/axolotl/pull/3796", smallest=[1, 1])
class NumberedMask(_Transformers):
    """The mask numbers the sequences 1, 2, 3, ...; sdpa takes every number for a one."""

    def given(self, packed: Packed) -> dict[str, Any]:
        owner, _ = owners(packed.lengths)
        return {"attention_mask": owner.unsqueeze(0) + 1, "use_cache": False}


@planted(EMBEDDINGS, "axolotl-ai-cloud/axolotl/issues/1375")
class SeveralRowsFallThrough(Encoding):
    """Two packed rows: cumulative lengths of one row alone are known, the other takes plain attention."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        half = len(packed.lengths) // 2
        if half == 0:
            return super().embed(model, packed, pooling)
        rest = sum(packed.lengths[half:])
        lengths = (*packed.lengths[:half], rest)
        ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
        rows = replace(packed, lengths=lengths, cu_seqlens=ends, order=tuple(range(len(lengths))))
        return _last(encoder.hidden_states(model, rows, self.backend), packed)


@planted("isolation.gradients_stay_within_the_sequence", smallest=[1, 1])
class BatchStatistics(Encoding):
    """Values are right, but each embedding's gradient reaches the whole batch."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        out = encoder.encode(model, packed, pooling, self.backend)
        mean = out.sum(dim=0)
        return out + (mean - mean.detach())


# --- who sees whom ----------------------------------------------------------------------------------


@planted(TOKENS, "pytorch/pytorch/issues/177378", smallest=[1, 1])
class EqualLengthsSeeEachOther(Backend):
    """Sequences of one length are a batch, and a batch without a mask of its own is one sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        runs = tuple(length * count for length, count in packed.runs)
        merged = replace(packed, lengths=runs, order=tuple(range(len(runs))))
        return attention.sdpa(q, k, v, merged, window, scale)


@planted(EMBEDDINGS, "facebookresearch/xformers/issues/1185", smallest=[1, 2])
class CausalityLost(Backend):
    """The block-diagonal mask loses its causality on its way to the device."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        return attention.sdpa(q, k, v, packed, (window[0], -1), scale)


@planted(EMBEDDINGS, "facebookresearch/xformers/issues/103", smallest=[2, 2])
class CausalWithAMaskOnly(Backend):
    """Causality is applied where a mask is given; sequences that are all of one length need none."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        window = (window[0], -1) if len(set(packed.lengths)) == 1 else window
        return attention.sdpa(q, k, v, packed, window, scale)


@planted(EMBEDDINGS, "huggingface/transformers/issues/48172", model="bert", smallest=[1, 2])
class CausalByDefault(Backend):
    """A module that does not say whether it is causal is taken to be."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        return attention.sdpa(q, k, v, packed, (window[0], 0), scale)


@planted(EMBEDDINGS, "McGill-NLP/llm2vec/issues/74", model="bert", smallest=[2, 2])
class CausalWithoutPads(Backend):
    """Without padding no mask is passed, and no mask means causal: where all lengths are equal."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        window = (window[0], 0) if len(set(packed.lengths)) == 1 else window
        return attention.sdpa(q, k, v, packed, window, scale)


@planted("isolation.number_does_not_matter", "huggingface/text-embeddings-inference/pull/648", smallest=[1, 2])
class OneTextHasNoMask(Backend):
    """For a batch of one text no mask is built."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        window = (window[0], -1) if len(packed.lengths) == 1 else window
        return attention.sdpa(q, k, v, packed, window, scale)


@planted(EMBEDDINGS, "vllm-project/vllm/issues/3385", model="mistral", smallest=[1, 5])
class WindowOneWider(Backend):
    """A window of W is read as W tokens besides the query's own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        window = (window[0] + 1 if window[0] >= 0 else -1, window[1])
        return attention.sdpa(q, k, v, packed, window, scale)


@planted(EMBEDDINGS, model="gemma3", smallest=[1, 9])
class WindowForgotten(Backend):
    """Sliding windows are left to the mask, and there is none."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        return attention.sdpa(q, k, v, packed, (-1, window[1]), scale)


@planted("agreement.every_pooling_equals_the_padded_one", model="modernbert", smallest=[1, 6])
class WindowOneSided(Backend):
    """A bidirectional window reaches to the left alone; to the right there is no limit."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        return attention.sdpa(q, k, v, packed, (window[0], -1), scale)


class _Masked(Backend):
    """Faults of ``seen``: which keys [T, T] a query sees by sequence and place."""

    def seen(self, packed: Packed, owner: Tensor, at: Tensor, window: Window) -> Tensor:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        return attention_by_mask(q, k, v, self.seen(packed, *owners(packed.lengths), window), scale)


def _apart(owner: Tensor) -> Tensor:
    return owner[:, None] == owner[None, :]


@planted(TOKENS, "huggingface/transformers/pull/39653", smallest=[1, 1])
class KeysHaveOtherBoundaries(_Masked):
    """The keys' boundaries are rebuilt apart from the queries', where position ids fall."""

    def seen(self, packed: Packed, owner: Tensor, at: Tensor, window: Window) -> Tensor:
        falls = torch.cat([at.new_zeros(1), (at[1:] < at[:-1]).long()]).cumsum(0)
        stream = torch.arange(len(at))
        return (falls[:, None] == falls[None, :]) & (stream[None, :] <= stream[:, None])


@planted(EMBEDDINGS, "NVIDIA-NeMo/Automodel/pull/3802", smallest=[1, 17])
class AddressesWrap(_Masked):
    """Places in the mask are looked up in too few bits: from the seventeenth token on the wrong row answers."""

    def seen(self, packed: Packed, owner: Tensor, at: Tensor, window: Window) -> Tensor:
        own = torch.eye(len(at), dtype=torch.bool)
        return _apart(owner) & (in_window(at % 16, window) | own)


@planted(TOKENS, smallest=[1, 1])
class OneKeyOfTheNeighbour(_Masked):
    """The block-diagonal mask is one token too wide: each sequence sees its predecessor's last token."""

    def seen(self, packed: Packed, owner: Tensor, at: Tensor, window: Window) -> Tensor:
        stream = torch.arange(len(at))
        before = (owner[None, :] == owner[:, None] - 1) & (stream[None, :] == stream[:, None] - at[:, None] - 1)
        return (_apart(owner) & in_window(at, window)) | before


@planted(EMBEDDINGS, smallest=[1, 2])
class FirstKeyHidden(_Masked):
    """cu_seqlens are off by one: a sequence's first token is seen by itself alone."""

    def seen(self, packed: Packed, owner: Tensor, at: Tensor, window: Window) -> Tensor:
        first = (at[None, :] == 0) & (at[:, None] > 0)
        return _apart(owner) & in_window(at, window) & ~first


@planted(TOKENS)
class OddSequencesShareTheirNumber(_Masked):
    """Sequences are told apart by a number of two bits: the fifth one is the first again."""

    def seen(self, packed: Packed, owner: Tensor, at: Tensor, window: Window) -> Tensor:
        stream = torch.arange(len(at))
        return _apart(owner % 4) & (stream[None, :] <= stream[:, None])


@planted(TOKENS, smallest=[1, 1])
class SecondLayerForgets(Backend):
    """Boundaries reach the first layer, and every layer after it takes the stream for one sequence."""

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        self.layer = 0
        return super().embed(model, packed, pooling)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, window: Window, scale: float) -> Tensor:
        self.layer += 1
        return attention.sdpa(q, k, v, packed if self.layer == 1 else merged(packed), window, scale)


# --- convolution and recurrence beside attention ----------------------------------------------------


def _by_sequences(function: Callable[..., Any], axis: int, lengths: tuple[int, ...]) -> Callable[..., Any]:
    """A mixer's part on each sequence by itself; ``axis`` is the tokens'."""

    def apart(*tensors: Any, **rest: Any) -> Any:
        total = sum(lengths)

        def cut(x: Any) -> list[Any]:
            whole = not isinstance(x, Tensor) or x.dim() <= axis or x.shape[axis] != total
            return [x] * len(lengths) if whole else list(x.split(list(lengths), axis))

        parts = [cut(x) for x in tensors]
        keywords = {name: cut(x) for name, x in rest.items()}
        outs = [
            function(*(part[i] for part in parts), **{name: own[i] for name, own in keywords.items()})
            for i in range(len(lengths))
        ]
        if isinstance(outs[0], tuple):
            return torch.cat([out[0] for out in outs], axis), None
        return torch.cat(outs, axis)

    return apart


class _Mixers(Encoding):
    """The mixer beside attention takes the stream for one sequence, but for the functions named ``kept``."""

    module = ""
    kept: tuple[tuple[str, int], ...] = ()

    def embed(self, model: PreTrainedModel, packed: Packed, pooling: str) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(mixers, "within_sequences", nullcontext))
            module = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
            for name, axis in self.kept:
                apart = _by_sequences(getattr(module, name), axis, packed.lengths)
                stack.enter_context(mock.patch.object(module, name, apart))
            return super().embed(model, packed, pooling)


@planted(TOKENS, "huggingface/transformers/pull/46588", model="lfm2", smallest=[1, 1])
class ConvolutionSlidesOver(_Mixers):
    """Attention knows the boundaries; the short convolution's window slides over them."""

    module = "lfm2"


@planted(TOKENS, "pytorch/torchtitan/pull/3892", model="qwen3-next", smallest=[1, 1])
class StateCarriedOver(_Mixers):
    """Attention knows the boundaries; convolution and recurrent state carry one sequence into the next."""

    module = "qwen3_next"


@planted(TOKENS, "THUDM/slime/pull/1686", model="qwen3-next", smallest=[1, 1])
class OnlyTheConvolutionKnows(_Mixers):
    """Cumulative lengths reach the convolution, but not the recurrent state."""

    module = "qwen3_next"
    kept = (("causal_conv1d_fn", 2),)


@planted(TOKENS, "NVIDIA-NeMo/Automodel/pull/2147", model="qwen3-next", smallest=[1, 1])
class OnlyTheRecurrenceKnows(_Mixers):
    """Cumulative lengths reach the recurrent state, but not the convolution: three tokens leak."""

    module = "qwen3_next"
    kept = (("torch_chunk_gated_delta_rule", 1),)
