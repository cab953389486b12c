"""Losses worked out by hand, for the definitions and for the implementation alike."""

from __future__ import annotations

import torch
from torch import Tensor

# q1, p1, n1, q2, p2, n2; labels 1 0 1 0.
ROWS = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [0, 1], [0.6, 0.8], [1, 0]], dtype=torch.float64)
LABELS = [1.0, 0.0, 1.0, 0.0]

# Loss, labels, each pair's distance (1 - cosine), value.
PAIRS: list[tuple[str, list[float], list[float], float]] = [
    ("cosine_similarity", [1, 0, 0], [0.2, 0.2, 2], 0.56),
    ("contrastive", [1, 0, 0], [0.2, 0.2, 2], 0.13 / 6),
    ("contrastive", [1, 0, 1], [0.4, 0.1, 0], 0.32 / 6),
    ("online_contrastive", [1, 0, 0], [0.2, 0.2, 2], 0.09),
    ("online_contrastive", [1, 1, 0], [0.2, 0.2, 2], 0.0),
    ("online_contrastive", [1, 1, 1], [0.2, 0.2, 2], 4.0),
    ("online_contrastive", [0, 0, 0], [0.2, 0.2, 2], 0.18),
    # Two of each: the farthest positive and the nearest negative are the limits.
    ("online_contrastive", [0, 0, 1, 1], [0.3, 0.35, 0.32, 0.4], 0.0625 + 0.2624),
    # One positive, one negative: the others' mean is the limit.
    ("online_contrastive", [0, 0, 1], [0.3, 0.35, 0.4], 0.04 + 0.16),
    ("online_contrastive", [0, 1, 1], [0.3, 0.32, 0.4], 0.04 + 0.16),
    # On the limit is not beyond it.
    ("online_contrastive", [0, 0, 1, 1], [0.3, 0.4, 0.3, 0.4], 0.04 + 0.16),
]


def pairs(distances: list[float]) -> Tensor:
    """Rows [2n, 2] whose pairs are so far apart; the second ones not of unit length."""
    cosines = [1 - d for d in distances]
    rows = [row for c in cosines for row in ([1.0, 0.0], [2 * c, 2 * (1 - c * c) ** 0.5])]
    return torch.tensor(rows, dtype=torch.float64)
