"""transformers: packed position ids through its models, and its two ways to find the sequences in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DataCollatorWithFlattening, PreTrainedModel
from transformers.masking_utils import create_causal_mask, find_packed_sequence_indices
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from tests.peers.flash import flashing

POSITIONS_AFTER_PAD = ("xlm-roberta",)  # its first token's position id is the pad id's and 1


class Packed:
    """DataCollatorWithFlattening's batch through the model with sdpa, no mask, no cache."""

    name = "transformers, packed"
    __version__ = transformers.__version__
    attention, mask, cache = "sdpa", False, False
    told = True  # the model is given what says where sequences begin, and not position ids alone

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """The states at the ends that the collator's cu_seq_lens name."""
        if layout.each > 1 or pooling != "last":
            raise NotImplementedError
        order = layout.arranged(len(sequences))
        batch = self.collated(model, [{"input_ids": list(sequences[i])} for i in order], layout.tail)
        batch.pop("labels")
        ends = batch["cu_seq_lens_q"][1:][: len(order)].long() - 1  # slots at the tail come after
        if not self.told:
            batch = {name: batch[name] for name in ("input_ids", "position_ids")}
        if self.mask:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        with _attending(model, self.attention):
            states = model(**batch, use_cache=self.cache).last_hidden_state[0]
        return torch.nn.functional.normalize(states[ends], dim=-1)[torch.tensor(order).argsort()]

    def collated(self, model: PreTrainedModel, features: list[dict[str, Any]], multiple: int) -> Any:
        """Numbered as the model wants it: from 0, or for RoBERTa's kin from 2."""
        if multiple > 1:
            raise NotImplementedError
        start = 2 if model.config.model_type in POSITIONS_AFTER_PAD else 0
        collator = DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=start
        )
        return collator(features, return_tensors="pt")


class PackedEager(Packed):
    """With eager attention."""

    name, attention = "transformers, packed, eager", "eager"


class PackedMask(Packed):
    """With a mask of ones beside the position ids."""

    name, mask = "transformers, packed, mask of ones", True


class PackedCache(Packed):
    """With a cache, as configurations have it by default."""

    name, cache = "transformers, packed, cache", True


class PackedFlash(Packed):
    """With flash attention, its kernels stood in for, and the collator's cumulative lengths."""

    name, attention = "transformers, packed, flash attention", "flash"


class PackedFlashPositions(PackedFlash):
    """With position ids alone, in which the flash-attention path finds the sequences."""

    name, told = "transformers, packed, flash attention, position ids", False


class PackedFlashMask(PackedFlash):
    """With a mask of ones beside the cumulative lengths."""

    name, mask = "transformers, packed, flash attention, mask of ones", True


class PackedDefault(Packed):
    """The collator as it comes, numbering from 0."""

    name = "transformers, packed, collator's defaults"

    def collated(self, model: PreTrainedModel, features: list[dict[str, Any]], multiple: int) -> Any:
        """No option but the lengths."""
        if multiple > 1:
            raise NotImplementedError
        return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features, return_tensors="pt")


class FlashArguments:
    """prepare_fa_kwargs_from_position_ids: what its flash-attention path makes of position ids."""

    name = "transformers, prepare_fa_kwargs_from_position_ids"
    __version__ = transformers.__version__

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """From cu_seq_lens_q."""
        if position_ids is None or position_ids.dim() > 1:
            raise NotImplementedError
        (cu_seqlens, _), _ = prepare_fa_kwargs_from_position_ids(position_ids[None])
        return cu_seqlens.diff().tolist()


class SequenceIndices:
    """find_packed_sequence_indices: what its masks make of position ids."""

    name = "transformers, find_packed_sequence_indices"
    __version__ = transformers.__version__

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """Tokens with each index."""
        if position_ids is None or position_ids.dim() > 1:
            raise NotImplementedError
        indices = find_packed_sequence_indices(position_ids[None])
        return [len(position_ids)] if indices is None else indices[0].unique_consecutive(return_counts=True)[1].tolist()


class FlexMask:
    """The mask it makes for flex attention, whose kernel on CPU has no backward."""

    name = "transformers, create_causal_mask for flex_attention"
    __version__ = transformers.__version__

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """Tokens whose rows begin at the same column."""
        if position_ids is None or position_ids.dim() > 1:
            raise NotImplementedError
        count = len(position_ids)
        config = transformers.Qwen3Config(attn_implementation="flex_attention")
        mask = create_causal_mask(config, torch.empty(1, count, 1), None, None, position_ids=position_ids[None])
        at = torch.arange(count)
        allowed = mask.mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None]).int()
        return allowed.argmax(1).unique_consecutive(return_counts=True)[1].tolist()


@contextmanager
def _attending(model: PreTrainedModel, attention: str) -> Iterator[None]:
    if attention == "flash":
        with flashing(model):
            yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
