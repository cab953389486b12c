"""TRL: the collator of its supervised fine-tuning, padding-free, before a model on the flash-attention path."""

from __future__ import annotations

from typing import Any

import trl
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from oracle.models import PAD_ID
from tests.peers.hf import PackedFlash
from tests.peers.models import lengths_of


class PaddingFree(PackedFlash):
    """Each text an example; slots at the tail by its ``pad_to_multiple_of``."""

    name = "TRL, padding_free"
    __version__ = trl.__version__

    def collated(self, model: PreTrainedModel, features: list[dict[str, Any]], multiple: int) -> Any:
        """Its batch."""
        return _collated(features, multiple)

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """What it makes of one packed example's ``seq_lengths``."""
        if cu_seqlens is None:
            raise NotImplementedError
        lengths = lengths_of(cu_seqlens)
        example = {"input_ids": [3] * sum(lengths), "seq_lengths": lengths}
        found: list[int] = _collated([example], 1)["cu_seq_lens_q"].diff().tolist()
        return found


class PaddingFreePositions(PaddingFree):
    """The model is given the position ids alone."""

    name, told = "TRL, padding_free, position ids", False


def _collated(examples: list[dict[str, Any]], multiple: int) -> Any:
    collator = DataCollatorForLanguageModeling(
        pad_token_id=PAD_ID, padding_free=True, pad_to_multiple_of=multiple if multiple > 1 else None
    )
    return collator(examples)
