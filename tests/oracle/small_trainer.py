"""A small trainer of embedding models as somebody might write it, padded or padding-free, with a bug still in it.

The README's guide asks of it whether two runs differ by noise or by a bug. ``CALL`` is what it passes to the packed
model besides the tokens: nothing, and transformers then makes a cache, with which packed sequences see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3Model

Groups = Sequence[Sequence[Sequence[int]]]  # of each group the token ids: anchor, positive, negatives
CALL: dict[str, Any] = {}  # mended: use_cache=False


def load_model() -> Qwen3Model:
    """A Qwen3 of two layers with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3Model(
            Qwen3Config(
                vocab_size=100,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                initializer_range=0.25,
            )
        )


def forward_padded(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """One row a sequence, padded on the right."""
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return F.normalize(states[torch.arange(len(ids)), mask.sum(1) - 1], dim=-1)


def forward_packed(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """One row for all; position ids say where a sequence begins."""
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    states = model(input_ids=ids[None], position_ids=positions[None], **CALL).last_hidden_state[0]
    ends = torch.tensor(lengths_from_position_ids(positions)).cumsum(0) - 1
    return F.normalize(states[ends], dim=-1)


def lengths_from_position_ids(position_ids: Tensor) -> list[int]:
    """Lengths of the packed sequences; slots of -1 may follow a sequence."""
    lengths: list[int] = []
    before = -1
    for position in position_ids.tolist():
        if position == 0:
            lengths.append(1)
        elif position > 0 and position == before + 1:
            lengths[-1] += 1
        elif position != -1 or not lengths:
            raise ValueError(f"position id {position} after {before}")
        before = position
    if not lengths:
        raise ValueError("no sequence")
    return lengths


def infonce(embeddings: Tensor, labels: Sequence[float], temperature: float) -> Tensor:
    """Each anchor against all positives and negatives. labels: 1 a positive, 0 a negative, none for an anchor."""
    anchors: list[int] = []
    documents: list[int] = []
    positives: list[int] = []
    for label in labels:
        if label:
            anchors.append(len(anchors) + len(documents))
            positives.append(len(documents))
        documents.append(len(anchors) + len(documents))
    if len(anchors) + len(documents) != len(embeddings) or not anchors or documents[0] < anchors[0]:
        raise ValueError(f"{len(labels)} labels, {len(anchors)} of them positives, for {len(embeddings)} embeddings")
    scores = embeddings[anchors] @ embeddings[documents].T / temperature
    return F.cross_entropy(scores, torch.tensor(positives))


def step(forward: Callable[..., Tensor], model: PreTrainedModel, groups: Groups) -> tuple[Tensor, Tensor]:
    """Forward and backward: the embeddings [n, 64] and the loss; gradients stay at the parameters."""
    embeddings = forward(model, [sequence for group in groups for sequence in group])
    labels = [float(at == 1) for group in groups for at in range(1, len(group))]
    loss = infonce(embeddings, labels, temperature=0.05)
    loss.backward()
    return embeddings.detach(), loss.detach()


def step_padded(model: PreTrainedModel, groups: Groups) -> tuple[Tensor, Tensor]:
    """A training step of the padded batch."""
    return step(forward_padded, model, groups)


def step_packed(model: PreTrainedModel, groups: Groups) -> tuple[Tensor, Tensor]:
    """A training step of the padding-free batch."""
    return step(forward_packed, model, groups)
