"""What the suite can drive: the surfaces an implementation may offer, each of them optional."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from oracle import losses
from oracle.case import Case, Options, Stream
from oracle.images import images_of
from oracle.outcome import Outcome

ORACLE = str(Path(__file__).parent)

SURFACES = (
    "boundaries",
    "unpack",
    "encode",
    "encode_multimodal",
    "loss",
    "step",
    "chunked_loss",
    "cached_step",
    "rank_loss",
    "split",
    "gather",
    "sharded_attention",
    "sharded_step",
    "streaming_step",
)


class Implementation(Protocol):
    """Structural: nobody need import this. A surface that is absent is reported as not offered.

    Also read, where present: ``name``, ``__version__``, and ``backends()`` -> the attention back ends
    that really ran.
    """

    def boundaries(
        self,
        position_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        count: int | None = None,
    ) -> list[int]:
        """Lengths of the sequences in a stream; raises where they cannot be known.

        position_ids: int64 [T], 0, 1, 2, ... in every sequence, -1 in slots; mRoPE's [3, T], or [4, T] with
        the text's first. Or cu_seqlens: int32 [n + 1]. Slots may follow a sequence, or the last one.
        count, lengths: what is known already; laws about them pass where the method does not take them.
        """
        ...

    def unpack(self, values: Tensor, position_ids: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Per-token values [T, ...] of a stream with slots: one [length, ...] a sequence, in stream order.

        position_ids: int64 [T], slots -1, or after the last sequence numbered like one.
        """
        ...

    def encode(
        self, model: PreTrainedModel, sequences: Sequence[Sequence[int]], layout: Stream, pooling: str = "last"
    ) -> Tensor:
        """L2-normalised embeddings [n, d], in the sequences' order, whatever the layout's; differentiable.

        Lay the stream out as your trainer does: ``layout.order`` is the stream's, ``tail`` and ``each`` say where
        slots go, ``slot`` and ``junk`` which ids they hold (``oracle.layout.packed_stream`` is one way). An encode
        that leaves slots out passes the laws about them for that reason alone.
        """
        ...

    def encode_multimodal(
        self,
        model: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        images: Sequence[Sequence[Any]],
        layout: Stream,
        pooling: str = "last",
    ) -> Tensor:
        """``encode`` of sequences with images: each run of the model's image token is the next of the
        sequence's ``images``, which have a ``grid`` (frames, height, width) and ``patches`` [patches, numbers].
        """
        ...

    def loss(self, embeddings: Tensor, labels: Sequence[float], options: Options) -> Tensor:
        """The loss that ``options`` ask for, a scalar; raises where labels and rows do not fit.

        NotImplementedError for options that are not known."""
        ...

    def step(self, model: PreTrainedModel, case: Case) -> Any:
        """Forward, loss and backward: an object with ``embeddings`` [n, d], ``loss``, ``gradients`` by
        parameter name and, if it likes, ``input_gradients``, one [length, d] a sequence."""
        ...

    def chunked_loss(self, embeddings: Tensor, labels: Sequence[float], options: Options, chunk: int) -> Tensor:
        """``loss`` computed with ``chunk`` groups at a time."""
        ...

    def cached_step(self, model: PreTrainedModel, case: Case, size: int) -> Any:
        """``step`` by a gradient cache: ``size`` sequences at a time, one loss over all."""
        ...

    def rank_loss(
        self, embeddings: Tensor, labels: Sequence[float], options: Options, group: Any, mean_of_ranks: bool = False
    ) -> Tensor:
        """The loss over all ranks' groups from this rank's rows, called in a process of its own under
        torch.distributed; the mean of the ranks' gradients must be the whole batch's. Other processes
        load the object by its class's name, or by an attribute ``specification``."""
        ...

    def split(
        self, field: Tensor, lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0, fill: float = 0
    ) -> list[Tensor]:
        """What each of ``ulysses`` x ``ring`` ranks holds of a packed stream's field [..., T, ...], in one process;
        differentiable.

        Entry ring rank * ulysses + Ulysses rank is that rank's. Where a token goes is your choice; all entries
        have one size, and slots hold ``fill``. lengths: of the sequences in stream order.
        """
        ...

    def gather(self, shards: Sequence[Tensor], lengths: Sequence[int], ulysses: int, ring: int, dim: int = 0) -> Tensor:
        """The inverse of ``split``: [..., T, ...]; differentiable. In slots the shards may hold anything, NaN too."""
        ...

    def sharded_attention(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ulysses: int, ring: int, causal: bool
    ) -> Tensor:
        """Attention [T, h, d] of q [T, h, d], k, v [T, h_kv, d], as so many ranks would compute it, in one process."""
        ...

    def sharded_step(self, model: PreTrainedModel, case: Case, groups: Any) -> Any:
        """One rank's part of a training step, in a process of its own.

        case: the groups of this data rank, which ``case.mesh.sharing`` ranks share, with the case's model, options
        and mesh. groups: see ``oracle.ranks.Groups``; rows join in data-rank order. Returns an object with
        embeddings (all of the case's), loss (the whole batch's, the mean over all groups, without any factor) and
        gradients by parameter name, such that their mean over ALL ranks, which the suite takes, is the whole
        batch's. Multiply the loss by the number of ranks before backward, not gradients anywhere after: exact
        arithmetic is at a rank's loss scale of 2^4 over the ranks. A step that puts factors elsewhere is right in
        float64 and rounds at other places; offer it as ``streaming_step``.

        Up to four ranks, in processes that live on: leave the model as it was. Those that share a batch must
        decline it alike, with NotImplementedError.
        """
        ...

    def streaming_step(self, model: PreTrainedModel, case: Case, groups: Any) -> Any:
        """The same with a running log-sum-exp, or with factors elsewhere, which exact arithmetic cannot follow:
        judged in plain float64, by ``oracle.tolerances.STREAMING``."""
        ...


class HarnessError(RuntimeError):
    """The suite itself is not sound here, or cannot run, so it must not judge anybody."""


def of_a_library(filename: str) -> bool:
    """Whether code in this file is neither the implementation's nor ours."""
    return "site-packages" in filename or filename.startswith("<")


def own_line(error: BaseException) -> str:
    """The innermost line on an error's way that the implementation wrote: file, number, function and text."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not of_a_library(f.filename)] or list(frames)
    line = ([f for f in own if not f.filename.startswith(ORACLE)] or own)[-1]
    return f"at {line.filename}:{line.lineno} in {line.name}: {line.line}"


def declines(error: BaseException) -> bool:
    """Whether an error says that this is not offered: NotImplementedError, and not torch's own."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, NotImplementedError) and not (frames and of_a_library(frames[-1].filename))


class ImplementationError(Exception):
    """An implementation that cannot be loaded, or offers no surface at all."""


def load(name: str) -> Any:
    """The implementation ``package.module:Object``; a class is instantiated without arguments."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ImplementationError(f"{name!r} does not read package.module:Object")
    if module_name.endswith(".py"):
        raise ImplementationError(f"{module_name} is a file; name the module, {module_name[:-3]}:{attribute}")
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        instance: Any = found() if inspect.isclass(found) else found
    except ModuleNotFoundError as error:
        raise ImplementationError(f"cannot import {module_name}: {error}") from error
    except AttributeError as error:
        raise ImplementationError(f"{module_name} has no {attribute}: {error}") from error
    except Exception as error:
        raise ImplementationError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(instance, "specification"):
        with suppress(AttributeError):  # how other processes find it; an object with slots may not take it
            instance.specification = name
    if not any(offers(instance, surface) for surface in SURFACES):
        raise ImplementationError(f"{name} is not an implementation: it has none of {', '.join(SURFACES)}")
    return instance


def offers(implementation: Any, surface: str) -> bool:
    """Whether the implementation has the surface."""
    return callable(getattr(implementation, surface, None))


def training_step(implementation: Any, model: PreTrainedModel, case: Case) -> Outcome:
    """The implementation's own step, or one made of its encode, its loss (or the definition) and backward.

    With images always the latter, of its encode_multimodal.
    """
    if case.images:
        embeddings = implementation.encode_multimodal(
            model, case.sequences, images_of(case), case.stream, case.options.pooling
        )
    elif offers(implementation, "step"):
        made = implementation.step(model, case)
        return Outcome(made.embeddings, made.loss, made.gradients, getattr(made, "input_gradients", None))
    else:
        embeddings = implementation.encode(model, case.sequences, case.stream, case.options.pooling)
    loss = (implementation.loss if offers(implementation, "loss") else losses.loss)(
        embeddings, case.labels, case.options
    )
    model.zero_grad()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Outcome(embeddings.detach(), loss.detach(), gradients)
