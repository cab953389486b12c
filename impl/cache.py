"""Gradient cache (Gao et al., 2021): embed in mini-batches, one loss over all, a second pass for gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Batch = TypeVar("Batch")


def cached_backward(
    embed: Callable[[Batch], Tensor], batches: Sequence[Batch], loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Backward of ``loss(all embeddings)`` with one mini-batch's activations at a time.

    The second pass repeats the first, dropout included: each mini-batch starts from the random state it
    started from before. Gradients add up in the parameters' ``.grad``, as after one plain backward.

    Args:
        embed: a mini-batch -> embeddings [n_i, d], differentiable.
        batches: mini-batches, in row order.
        loss: embeddings [n, d] -> scalar.

    Returns:
        The loss and the embeddings, detached.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    states, pieces = [], []
    with torch.no_grad():
        for batch in batches:
            states.append((torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]))
            pieces.append(embed(batch))
    embeddings = torch.cat(pieces).detach().requires_grad_()
    value = loss(embeddings)
    value.backward()
    assert embeddings.grad is not None
    gradients = embeddings.grad.split([len(piece) for piece in pieces])
    for batch, gradient, (cpu, cuda) in zip(batches, gradients, states, strict=True):
        with torch.random.fork_rng(devices=devices):
            _restore(cpu, cuda)
            embed(batch).backward(gradient=gradient)
    return value.detach(), embeddings.detach()


def _restore(cpu: Tensor, cuda: Sequence[Tensor]) -> None:
    torch.set_rng_state(cpu)
    for device, state in enumerate(cuda):
        torch.cuda.set_rng_state(state, device)
