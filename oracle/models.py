"""Small deterministic Hugging Face models by name: float64, weights from a seed, on the grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig as PreTrainedConfig  # its name before transformers 5
from transformers import PreTrainedModel

from oracle.case import IMAGE_ID, PATCHES

VOCABULARY = 128  # text ids; IMAGE_ID comes next
PAD_ID = 0
HIDDEN = 32

# Head dimension 8 and this base make every rotary frequency a power of two: the same on any machine.
ROPE_BASE = 2.0**16


@dataclass(frozen=True)
class ModelKind:
    """How to build one architecture, and what a caller must know of it.

    causal: each token sees only what comes before it, so the last token is the natural one to pool.
    first_position: position id of a sequence's first token. visual: it takes images. longest: tokens of a
    sequence that cases for it may have. norms_add_one: its norms multiply by 1 + weight.
    """

    build: Callable[[], PreTrainedModel]
    causal: bool = True
    first_position: int = 0
    visual: bool = False
    longest: int = 10_000
    norms_add_one: bool = False


_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD_ID,
}


def _decoder(
    model: type[PreTrainedModel], config: type[PreTrainedConfig], **extra: Any
) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        return model(config(**(_TEXT | {"rope_theta": ROPE_BASE} | extra)))

    return build


def _encoder(
    model: type[PreTrainedModel], config: type[PreTrainedConfig], arguments: dict[str, Any] | None = None, **extra: Any
) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        shape: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 514,
            "pad_token_id": PAD_ID,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
        }
        return model(config(**(shape | extra)), **(arguments or {}))

    return build


_ROPE = {"rope_type": "default", "rope_theta": ROPE_BASE}

PATCH_SIZE = 2  # pixels, each way; one frame, three colours
PATCH_NUMBERS = PATCH_SIZE * PATCH_SIZE * 3


def _visual(
    model: type[PreTrainedModel], config: type[PreTrainedConfig], rope: dict[str, Any], **extra: Any
) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        text = _TEXT | {"vocab_size": IMAGE_ID + 1, "bos_token_id": None, "eos_token_id": None}
        tower: dict[str, Any] = {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 24,
            "patch_size": PATCH_SIZE,
            "temporal_patch_size": 1,
            "spatial_merge_size": math.isqrt(PATCHES),
            "out_hidden_size": HIDDEN,
            "rope_parameters": {"rope_type": "axial", "rope_theta": ROPE_BASE},
        }
        return model(
            config(
                text_config=text | {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]} | rope},
                vision_config=tower | extra,
                image_token_id=IMAGE_ID,
                video_token_id=IMAGE_ID + 1,
            )
        )

    return build


MODELS: dict[str, ModelKind] = {
    "qwen3": ModelKind(_decoder(transformers.Qwen3Model, transformers.Qwen3Config)),
    # As many key-value heads as heads, so that four Ulysses ranks can share them.
    "qwen3-mha": ModelKind(_decoder(transformers.Qwen3Model, transformers.Qwen3Config, num_key_value_heads=4)),
    "llama": ModelKind(_decoder(transformers.LlamaModel, transformers.LlamaConfig)),
    "mistral": ModelKind(_decoder(transformers.MistralModel, transformers.MistralConfig, sliding_window=4)),
    "gemma3": ModelKind(
        _decoder(
            transformers.Gemma3TextModel,
            transformers.Gemma3TextConfig,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
            rope_parameters={"sliding_attention": _ROPE, "full_attention": _ROPE},
        )
    ),
    "qwen3-moe": ModelKind(
        _decoder(
            transformers.Qwen3MoeModel,
            transformers.Qwen3MoeConfig,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        )
    ),
    # Its recurrence goes in chunks of 64 tokens: where the next one begins, which pads may shift, other products are
    # rounded. So a row, with up to 5 extra columns, stays within the first chunk.
    "qwen3-next": ModelKind(
        _decoder(
            transformers.Qwen3NextModel,
            transformers.Qwen3NextConfig,
            layer_types=["linear_attention", "full_attention"],
            mlp_only_layers=[0, 1],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            partial_rotary_factor=1.0,
        ),
        longest=59,
        norms_add_one=True,
    ),
    "lfm2": ModelKind(
        _decoder(
            transformers.Lfm2Model,
            transformers.Lfm2Config,
            layer_types=["conv", "full_attention"],
            rope_parameters=_ROPE,
        )
    ),
    "bert": ModelKind(
        _encoder(transformers.BertModel, transformers.BertConfig, {"add_pooling_layer": False}), causal=False
    ),
    "xlm-roberta": ModelKind(
        _encoder(
            transformers.XLMRobertaModel, transformers.XLMRobertaConfig, {"add_pooling_layer": False}, pad_token_id=1
        ),
        causal=False,
        first_position=2,
    ),
    "modernbert": ModelKind(
        _encoder(
            transformers.ModernBertModel,
            transformers.ModernBertConfig,
            local_attention=8,
            layer_types=["full_attention", "sliding_attention"],
            bos_token_id=None,
            eos_token_id=None,
            cls_token_id=None,
            sep_token_id=None,
            rope_parameters={"sliding_attention": _ROPE, "full_attention": _ROPE},
        ),
        causal=False,
    ),
    "qwen2.5-vl": ModelKind(
        _visual(
            transformers.Qwen2_5_VLModel,
            transformers.Qwen2_5_VLConfig,
            {},
            window_size=8,
            fullatt_block_indexes=[1],
        ),
        visual=True,
    ),
    "qwen3-vl": ModelKind(
        _visual(
            transformers.Qwen3VLModel,
            transformers.Qwen3VLConfig,
            {"mrope_interleaved": True},
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        visual=True,
    ),
}

VISUAL = tuple(name for name, each in MODELS.items() if each.visual)


class UnknownModelError(ValueError):
    """A model name that is not in ``MODELS``."""


def kind(name: str) -> ModelKind:
    """What is known of the model ``name``; UnknownModelError lists the names there are."""
    if name not in MODELS:
        raise UnknownModelError(f"no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]


@lru_cache(maxsize=32)
def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """The small model ``name``, float64, in training mode without dropout; one object for each seed.

    Weights are integers over 256 drawn from ``seed``, wide enough (deviation about 0.25) that attention
    is far from uniform; norm weights lie around 1. Everything is on the grid of the exact mode.
    """
    with torch.random.fork_rng(devices=[]):  # transformers draws weights, ours replace them
        model = kind(name).build().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in sorted(model.named_parameters()):
            scale = parameter.dim() == 1 and label.endswith("weight")
            centre = 1.0 if scale and not kind(name).norms_add_one else 0.0
            drawn = torch.randint(-110, 111, parameter.shape, generator=generator) / 256
            if label.endswith("A_log"):  # a call's exp(A_log) rounds the gradient once a call: exp(0) does not
                drawn = torch.zeros_like(drawn)
            if label.endswith("linear_attn.out_proj.weight"):  # keys normalised from near 0 have large gradients
                drawn = drawn / 16
            parameter.copy_(centre + drawn)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(_nearest_power_of_two(buffer))
    return model


def _nearest_power_of_two(frequencies: Tensor) -> Tensor:
    """Rotary frequencies are powers of two by ROPE_BASE; torch.pow may miss them by an ulp."""
    if not bool((frequencies > 0).all()):
        return frequencies
    powers = torch.log2(frequencies.double()).round()
    exact = torch.tensor([math.ldexp(1.0, int(p)) for p in powers.flatten().tolist()], dtype=torch.float64)
    exact = exact.view(powers.shape)
    return exact if torch.allclose(exact, frequencies.double(), rtol=1e-5, atol=0) else frequencies


def key_value_heads(name: str) -> int:
    """How many the model ``name`` has in each layer."""
    config = tiny(name).config.get_text_config()
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def input_embeddings(model: PreTrainedModel) -> nn.Embedding:
    """The module that turns token ids into vectors."""
    module = model.get_input_embeddings()
    assert isinstance(module, nn.Embedding)
    return module
