"""NeMo Automodel: boundaries from its indexed masks, and its InfoNCE."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from nemo_automodel.components.datasets.packing import get_unpad_data
from nemo_automodel.components.datasets.utils import pack_features_for_thd
from nemo_automodel.components.loss.infonce import infonce_loss
from torch import Tensor

from tests.peers.models import lengths_of


class Retrieval:
    """Its functions for packed batches and the loss of its bi-encoders."""

    name = "NeMo Automodel"
    __version__ = version("nemo-automodel")

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """From a mask that numbers the sequences, as its packing writes it."""
        if cu_seqlens is None:
            raise NotImplementedError
        features = [{"input_ids": [3] * length} for length in lengths_of(cu_seqlens)]
        lengths = torch.tensor(pack_features_for_thd(features)["seq_lens"])
        mask = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)[None]
        found: list[int] = get_unpad_data(mask)[1].diff().tolist()
        return found

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """Anchors, positives, and each anchor's own negatives, masked where it has fewer."""
        unknown = options.include_qq or options.include_dd or options.mask_fake_negative or options.matryoshka
        if options.loss != "infonce" or unknown or options.hard_negatives is not None:
            raise NotImplementedError
        starts = [i for i, label in enumerate(labels) if label]
        sizes = [end - start - 1 for start, end in zip(starts, [*starts[1:], len(labels)], strict=True)]
        if len(embeddings) != len(labels) + len(starts) or (not max(sizes) and not options.use_batch):
            raise NotImplementedError
        if max(sizes) and options.use_batch and len(sizes) > 1:
            raise NotImplementedError  # negatives of one group are none of another's there
        groups = embeddings.split([size + 2 for size in sizes])
        negatives = mask = None
        if max(sizes):
            negatives = torch.stack([_filled(group[2:], max(sizes)) for group in groups])
            mask = torch.tensor([[at < size for at in range(max(sizes))] for size in sizes]).long()
        return infonce_loss(
            torch.stack([group[0] for group in groups]),
            torch.stack([group[1] for group in groups]),
            negatives,
            mask,
            temperature=options.temperature,
            use_in_batch_negatives=options.use_batch,
            normalize=False,
        )


def _filled(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])])
