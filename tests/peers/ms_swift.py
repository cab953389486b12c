"""ms-swift, 3.10 and 4.x: its collator, its model with the hooks of its trainer, its re-padding, pooling and losses.

``python -m oracle check tests.peers.ms_swift:PaddingFree`` in an environment that has the package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("USE_HF", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.peers.models import directory, only

VERSION = version("ms-swift")
OLD = VERSION.startswith("3.")

if OLD:
    from swift.llm import get_model_tokenizer, get_template
    from swift.llm.model.patcher import revert_padding_free
    from swift.plugin import loss as losses
    from swift.utils.torch_utils import get_cu_seqlens_from_position_ids, get_position_ids_from_cu_seqlens
else:
    from swift.loss import embedding as losses
    from swift.model import get_model_processor
    from swift.model.patcher import revert_padding_free
    from swift.template import get_template
    from swift.utils.transformers_utils import get_cu_seqlens_from_position_ids, get_position_ids_from_cu_seqlens

from swift.trainers.mixin import SwiftMixin  # noqa: E402


@cache
def loaded(padding_free: bool, padding_side: str) -> tuple[Any, Any]:
    """The model as its trainer prepares it, and the template that collates for it."""
    known: dict[str, Any] = {"model_type": "qwen3_emb", "task_type": "embedding", "attn_impl": "sdpa"}
    known |= {"torch_dtype": torch.float32, "use_hf": True, "device_map": "cpu"}
    options = {"padding_free": padding_free, "padding_side": padding_side}
    if OLD:
        model, tokenizer = get_model_tokenizer(directory(), **known)
        template = get_template(model.model_meta.template, tokenizer, **options)
    else:
        model, tokenizer = get_model_processor(directory(), **known)
        template = get_template(tokenizer, template_type="qwen3_emb", **options)
        template.use_model = True
    template.set_mode("train")
    template.task_type = "embedding"
    model.config.use_cache = False
    args = SimpleNamespace(task_type="embedding", **options)
    trainer = SimpleNamespace(model=model, template=template, task_type="embedding", args=args)
    SwiftMixin._patch_tasks(trainer)
    return model, template


class PaddingFree:
    """The whole path with --padding_free: collator, model, hooks, re-padding, pooling, loss."""

    name = "ms-swift, padding_free"
    __version__ = VERSION
    padding_free, padding_side = True, "right"

    def __init__(self) -> None:
        loaded(self.padding_free, self.padding_side)  # outside exact arithmetic, which has no use for its set-up

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """The rows that its re-padding makes, counted."""
        count = len(position_ids) if position_ids is not None else int(cu_seqlens[-1])
        if position_ids is not None and position_ids.dim() > 1:
            raise NotImplementedError
        inputs = {"position_ids": position_ids[None]} if position_ids is not None else {"cu_seq_lens_q": cu_seqlens}
        outputs = revert_padding_free({"last_hidden_state": torch.ones(1, count, 1)}, inputs, self.padding_side)
        return [int(row.sum()) for row in outputs["last_hidden_state"]]

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """What its model returns for what its collator makes."""
        only(model, "qwen3")
        if layout.tail > 1 or layout.each > 1 or pooling != "last":
            raise NotImplementedError
        whole, template = loaded(self.padding_free, self.padding_side)
        order = layout.arranged(len(sequences))
        batch = [{"input_ids": list(sequences[i]), "length": len(sequences[i])} for i in order]
        inputs = template.data_collator(batch)
        with _around(whole, model):
            found = whole(**inputs)["last_hidden_state"]
        if len(found) != len(sequences):  # the law that counts them is to see it
            return found
        return found[torch.tensor(order).argsort()]

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
        """Its losses, told by environment variables what to do."""
        return swift_loss(embeddings, labels, options)


class Padded(PaddingFree):
    """The same with padding_free off: padded on the right."""

    name = "ms-swift, padded right"
    padding_free = False
    boundaries = None


class PaddedLeft(Padded):
    """Padded on the left."""

    name = "ms-swift, padded left"
    padding_side = "left"


class ZeroPositions:
    """The other rule for boundaries, of packed parameters, sequence parallelism and Megatron: a position id of 0."""

    name = "ms-swift, get_cu_seqlens_from_position_ids"
    __version__ = VERSION

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """From cu_seqlens by way of its position ids."""
        if position_ids is None:
            position_ids = get_position_ids_from_cu_seqlens(cu_seqlens)[0]
        if position_ids.dim() > 1:
            raise NotImplementedError
        return get_cu_seqlens_from_position_ids(position_ids[None]).diff().tolist()


@contextmanager
def _around(whole: Any, model: PreTrainedModel) -> Iterator[None]:
    """Its model with the suite's weights in it, and no cache, as its trainer sees to."""
    before, whole.model = whole.model, model
    training, cached = whole.training, model.config.use_cache
    whole.training, model.config.use_cache = model.training, False
    try:
        yield
    finally:
        whole.model, whole.training, model.config.use_cache = before, training, cached


PAIRS = {
    "cosine_similarity": ("cosine_similarity_func", "CosineSimilarityLoss"),
    "contrastive": ("contrastive_loss", "ContrastiveLoss"),
    "online_contrastive": ("online_contrastive_loss", "OnlineContrastiveLoss"),
    "infonce": ("infonce_loss", "InfonceLoss"),
}


def swift_loss(embeddings: Tensor, labels: Sequence[float], options: Any) -> Tensor:
    """One of its losses; options it lacks are declined."""
    if options.loss not in PAIRS or options.matryoshka:
        raise NotImplementedError
    told = {
        "INFONCE_TEMPERATURE": options.temperature,
        "INFONCE_USE_BATCH": options.use_batch,
        "INFONCE_MASK_FAKE_NEGATIVE": options.mask_fake_negative,
        "INFONCE_FAKE_NEG_MARGIN": options.fake_negative_margin,
        "INFONCE_INCLUDE_QQ": options.include_qq,
        "INFONCE_INCLUDE_DD": options.include_dd,
    }
    if options.hard_negatives is not None:
        told["INFONCE_HARD_NEGATIVES"] = options.hard_negatives
        starts = [i for i, label in enumerate(labels) if label]
        own = [end - start - 1 for start, end in zip(starts, [*starts[1:], len(labels)], strict=True)]
        if any(1 < count < options.hard_negatives for count in own):
            raise NotImplementedError  # which of several are taken again is chance
    outputs = {"last_hidden_state": embeddings}
    function, class_ = PAIRS[options.loss]
    with patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        if OLD:
            return getattr(losses, function)(outputs, torch.tensor(labels))
        return getattr(losses, class_)(SimpleNamespace(), SimpleNamespace())(outputs, torch.tensor(labels))
