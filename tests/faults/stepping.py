"""The end of a training step, as faulty implementations take it."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor
from transformers import PreTrainedModel


def finished(model: PreTrainedModel, embeddings: Tensor, loss: Tensor) -> SimpleNamespace:
    """Runs backward and takes the gradients out of the model."""
    model.zero_grad()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return SimpleNamespace(embeddings=embeddings.detach(), loss=loss.detach(), gradients=gradients)
