"""ms-swift's Megatron branch as far as one CPU goes: its collator, its packed parameters, its rule for last tokens.

Megatron itself is not installed: its modules are stand-ins, and transformers' model on its flash-attention path takes
the place of Megatron's, given what Megatron's would be given.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.peers.flash import flashing
from tests.peers.models import only
from tests.peers.ms_swift import VERSION, loaded


class _Named(type):
    """A class of which every attribute is there, another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, made := _named(name))
        return made


def _named(name: str) -> Any:
    return _Named(name, (SimpleNamespace,), {})


class _Absent(ModuleType):
    """A module that has whatever is imported from it."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.19.2"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := _named(name))
        return made


class _StandIns(MetaPathFinder, Loader):
    """Finds the packages that ms-swift's Megatron branch imports and a CPU cannot have."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".", maxsplit=1)[0] in ("megatron", "mcore_bridge") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: see ``_Absent``."""


sys.meta_path.append(_StandIns())
from swift.megatron.trainers.base import BaseMegatronTrainer  # noqa: E402
from swift.megatron.utils import get_packed_seq_params, get_padding_to  # noqa: E402


class MegatronPaddingFree:
    """Packed; ``each`` slots as for context parallelism, ``tail`` ones as for Megatron's sequence parallelism.

    The losses are those of its other trainers.
    """

    name = "ms-swift, Megatron, padding_free"
    __version__ = VERSION
    padding_free = True

    def __init__(self) -> None:
        loaded(self.padding_free, "right")

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last"
    ) -> Tensor:
        """The last tokens that its trainer finds in the model's output."""
        only(model, "qwen3")
        sharing = max(layout.each // 2, 1)
        if pooling != "last" or layout.each not in (1, 2 * sharing) or (sharing > 1 and layout.tail % 2):
            raise NotImplementedError
        args = SimpleNamespace(
            tensor_model_parallel_size=layout.tail,
            context_parallel_size=sharing,
            sequence_parallel=True,
            fp8_recipe=None,
            attention_backend="flash",
            cp_partition_mode="zigzag",
        )
        template = copy.copy(loaded(self.padding_free, "right")[1])
        template.use_megatron, template.sequence_parallel_size = True, sharing
        order = layout.arranged(len(sequences))
        batch = [{"input_ids": list(sequences[i]), "length": len(sequences[i])} for i in order]
        inputs = template.data_collator(batch, padding_to=get_padding_to(args))
        found = self.last_tokens(model, inputs, args)
        return torch.nn.functional.normalize(found, dim=1)[torch.tensor(order).argsort()]

    def last_tokens(self, model: PreTrainedModel, inputs: dict[str, Any], args: SimpleNamespace) -> Tensor:
        """From the packed row."""
        packed = get_packed_seq_params(args, inputs["position_ids"])
        packed.seq_lens = torch.tensor(inputs["seq_lens"])
        with flashing(model):
            output = model(
                input_ids=inputs["input_ids"],
                position_ids=inputs["position_ids"],
                cu_seq_lens_q=packed.cu_seqlens_q,
                cu_seq_lens_k=packed.cu_seqlens_kv,
                max_length_q=packed.max_seqlen_q,
                max_length_k=packed.max_seqlen_kv,
                use_cache=False,
            ).last_hidden_state
        return _last_tokens(output, packed_seq_params=packed)


class MegatronPadded(MegatronPaddingFree):
    """Rows padded on the right, with a mask of what must not be seen."""

    name = "ms-swift, Megatron, padded"
    padding_free = False

    def last_tokens(self, model: PreTrainedModel, inputs: dict[str, Any], args: SimpleNamespace) -> Tensor:
        """From the padded rows."""
        hidden = inputs["attention_mask"]
        output = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            attention_mask=~hidden,
            use_cache=False,
        ).last_hidden_state
        return _last_tokens(output, attention_mask=hidden)


def _last_tokens(output: Tensor, **told: Any) -> Tensor:
    """Its trainer's own method; the output is whole, as it is once gathered."""
    whole = SimpleNamespace(args=SimpleNamespace(context_parallel_size=1))
    found: Tensor = BaseMegatronTrainer.get_last_tokens(whole, output, **told)
    return found
