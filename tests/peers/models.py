"""Model directories without a hub: a tiny Qwen3 and a tokenizer in which the word t5 is the token 5."""

from __future__ import annotations

import atexit
import copy
import tempfile
from collections.abc import Sequence
from functools import cache
from shutil import rmtree

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from oracle.models import PAD_ID, VOCABULARY, tiny


def only(model: PreTrainedModel, *kinds: str) -> None:
    """Declines other models than these."""
    if model.config.model_type not in kinds:
        raise NotImplementedError


def causal(model: PreTrainedModel) -> Qwen3ForCausalLM:
    """A language model around an encoder: the same modules and parameters."""
    with torch.random.fork_rng(devices=[]):
        whole = Qwen3ForCausalLM(model.config)
    whole.model = model
    return whole.to(model.dtype)


@cache
def directory(model: str = "qwen3") -> str:
    """A folder as from a hub: configuration, weights, tokenizer. A Qwen3 is a language model there."""
    folder = tempfile.mkdtemp(prefix=f"tiny-{model}-")
    atexit.register(rmtree, folder, ignore_errors=True)
    own = copy.deepcopy(tiny(model))
    (causal(own) if model == "qwen3" else own).float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Whitespace between words; pad 0, unknown 1, end 2."""
    words = {"<pad>": PAD_ID, "<unk>": 1, "<end>": 2} | {f"t{i}": i for i in range(3, VOCABULARY)}
    raw = Tokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", padding_side="right"
    )


def text(ids: Sequence[int]) -> str:
    """What the tokenizer reads these ids from."""
    return " ".join(tokenizer().convert_ids_to_tokens(list(ids)))


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    """For what takes lengths: cumulative lengths that are malformed never get there, and are declined."""
    lengths: list[int] = cu_seqlens.diff().tolist()
    if int(cu_seqlens[0]) or min(lengths, default=0) < 1:
        raise NotImplementedError
    return lengths
