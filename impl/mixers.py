"""Token mixers beside attention: short convolutions and linear recurrences, kept within their sequences.

Cumulative lengths keep attention within a sequence; a layer that mixes neighbours some other way must know
them too, or it carries the end of one sequence into the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from impl.errors import BackendError
from impl.packing import Packed

ATTENTION = ("full_attention", "sliding_attention")

# transformers' name of a layer's type -> the attribute that holds its mixer.
MIXERS = {"linear_attention": "linear_attn", "conv": "conv"}


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that mix tokens without attention: Qwen3-Next's gated delta rule, LFM2's short convolution.

    Raises:
        BackendError: a layer of a type that is neither attention nor one of these, or a convolution outside
            them (Mamba's, say); names it.
    """
    text = model.get_decoder()
    found = []
    for at, kind in enumerate(getattr(text.config, "layer_types", None) or ()):
        if kind in ATTENTION:
            continue
        mixer = getattr(text.layers[at], MIXERS[kind], None) if kind in MIXERS else None
        if not isinstance(mixer, nn.Module):
            raise BackendError(f"layer {at} is of type {kind}, whose boundaries padding-free encoding cannot keep")
        found.append(mixer)
    known = {id(module) for mixer in found for module in mixer.modules()}
    for name, module in text.named_modules():
        if isinstance(module, nn.Conv1d) and id(module) not in known:
            raise BackendError(f"{name} is a convolution, whose boundaries padding-free encoding cannot keep")
    return found


def _by_runs(self: nn.Module, hidden_states: Tensor, *arguments: Any, packing: Any = None, **rest: Any) -> Tensor:
    """The mixer's own forward on each run of equal lengths, as a batch of plain views: [1, T, d] -> [1, T, d]."""
    forward = type(self).forward
    if packing is None:
        return forward(self, hidden_states, *arguments, **rest)
    if not isinstance(packing, Packed):
        raise BackendError(f"{type(self).__name__} mixes tokens without attention: it cannot be sharded")
    pieces = hidden_states.split([length * count for length, count in packing.runs], dim=1)
    outputs = []
    for (length, count), piece in zip(packing.runs, pieces, strict=True):
        out = forward(self, piece.view(count, length, -1), *arguments, **rest)
        outputs.append(out.reshape(1, count * length, -1))
    return torch.cat(outputs, dim=1)


def install(model: PreTrainedModel) -> None:
    """Keeps the model's mixers within their sequences wherever a call brings its ``packing``; for good."""
    _install(mixers(model))


def _install(found: list[nn.Module]) -> None:
    for mixer in found:
        mixer.forward = MethodType(_by_runs, mixer)


@contextmanager
def within_sequences(model: PreTrainedModel) -> Iterator[None]:
    """``install`` for a while."""
    changed = [mixer for mixer in mixers(model) if "forward" not in vars(mixer)]
    _install(changed)
    try:
        yield
    finally:
        for mixer in changed:
            del mixer.forward
