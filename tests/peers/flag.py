"""FlagEmbedding: its embedders' encoding of padded batches, and their losses."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from FlagEmbedding.finetune.embedder.decoder_only.base.modeling import BiDecoderOnlyEmbedderModel
from FlagEmbedding.finetune.embedder.encoder_only.base.modeling import BiEncoderOnlyEmbedderModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.peers.models import tokenizer

POOLING = {"last": "last_token", "cls": "cls", "mean": "mean"}


class Embedder:
    """Encoders as BGE's, and decoders for Qwen3's kin."""

    name = "FlagEmbedding"
    __version__ = version("FlagEmbedding")

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """Padded on the right, three texts at a time."""
        if layout.tail > 1 or layout.each > 1 or pooling not in POOLING:
            raise NotImplementedError
        order = layout.arranged(len(sequences))
        features = tokenizer().pad({"input_ids": [list(sequences[i]) for i in order]}, return_tensors="pt")
        kind = BiEncoderOnlyEmbedderModel if model.config.model_type == "bert" else BiDecoderOnlyEmbedderModel
        embedder = kind(model, sub_batch_size=3, sentence_pooling_method=POOLING[pooling], normalize_embeddings=True)
        found: Tensor = embedder.encode(dict(features))
        return found[torch.tensor(order).argsort()]

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """In-batch or not; groups of unequal size it does not know."""
        unknown = options.include_qq or options.include_dd or options.mask_fake_negative or options.matryoshka
        if options.loss != "infonce" or unknown or options.hard_negatives is not None:
            raise NotImplementedError
        starts = [i for i, label in enumerate(labels) if label]
        sizes = {end - start for start, end in zip(starts, [*starts[1:], len(labels)], strict=True)}
        if len(sizes) != 1 or len(embeddings) != len(labels) + len(starts):
            raise NotImplementedError
        groups = embeddings.view(len(starts), sizes.pop() + 1, -1)
        embedder = BiEncoderOnlyEmbedderModel(_None(), temperature=options.temperature)
        name = "_compute_in_batch_neg_loss" if options.use_batch else "_compute_no_in_batch_neg_loss"
        found: Tensor = getattr(embedder, name)(groups[:, 0], groups[:, 1:].flatten(0, 1))[1]
        return found


class _None(nn.Module):
    """In the place of a model."""

    config = None
