"""twinkle-kit: its boundaries, its pooling of packed features, and its InfoNCE."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from twinkle.loss.infonce import InfonceLoss
from twinkle.processor.base import InputProcessor

from tests.peers.flash import flashing


class PaddingFree:
    """The model on the flash-attention path with its packed parameters, its pooling, its loss."""

    name = "twinkle, padding_free"
    __version__ = version("twinkle-kit")

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """From its packed parameters."""
        if position_ids is None or position_ids.dim() > 1:
            raise NotImplementedError
        found: list[int] = InputProcessor._get_packed_seq_params(position_ids[None]).cu_seqlens_q.diff().tolist()
        return found

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """Features of the packed row, pooled."""
        if layout.tail > 1 or layout.each > 1 or pooling != "last":
            raise NotImplementedError
        order = layout.arranged(len(sequences))
        ids = torch.tensor([[token for i in order for token in sequences[i]]])
        positions = torch.cat([torch.arange(len(sequences[i])) for i in order])[None]
        packed = InputProcessor._get_packed_seq_params(positions)
        told = {"cu_seq_lens_q": packed.cu_seqlens_q, "cu_seq_lens_k": packed.cu_seqlens_kv}
        told |= {"max_length_q": int(packed.max_seqlen_q), "max_length_k": int(packed.max_seqlen_kv)}
        with flashing(model):
            features = model(input_ids=ids, position_ids=positions, use_cache=False, **told).last_hidden_state
        inputs = {"position_ids": positions} | told
        _, outputs = _processor()._postprocess_embedding(inputs, {"features": features})
        found: Tensor = outputs["embeddings"]
        return found[torch.tensor(order).argsort()]

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """Its labels are one for each row, 1 at an anchor."""
        if options.loss != "infonce" or options.matryoshka:
            raise NotImplementedError
        if options.mask_fake_negative and options.fake_negative_margin <= 0:
            raise NotImplementedError
        starts = [i for i, label in enumerate(labels) if label]
        if options.hard_negatives is not None:
            own = [end - start - 1 for start, end in zip(starts, [*starts[1:], len(labels)], strict=True)]
            if any(count < options.hard_negatives for count in own):
                raise NotImplementedError  # which are taken again is chance, and none at all is refused
        rows = [entry for label in labels for entry in ((1.0, 0.0) if label else (0.0,))]
        loss = InfonceLoss(
            temperature=options.temperature,
            use_batch=options.use_batch,
            hard_negatives=options.hard_negatives,
            mask_fake_negative=options.mask_fake_negative,
            fake_neg_margin=options.fake_negative_margin,
            include_qq=options.include_qq,
            include_dd=options.include_dd,
        )
        found: Tensor = loss({"labels": torch.tensor(rows)}, {"embeddings": embeddings})["loss"]
        return found


class Positions(PaddingFree):
    """Without cumulative lengths its pooling finds the ends in position ids."""

    name = "twinkle, pooling by position ids"
    encode = loss = None

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """From the last tokens."""
        if position_ids is None or position_ids.dim() > 1:
            raise NotImplementedError
        ends = InputProcessor._packed_last_indices(position_ids[None], len(position_ids))
        found: list[int] = torch.cat([ends.new_tensor([-1]), ends]).diff().tolist()
        return found


def _processor() -> InputProcessor:
    made = InputProcessor.__new__(InputProcessor)
    made.framework = "transformers"
    return made
