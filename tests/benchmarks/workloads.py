"""What the benchmarks run: ragged batches, and the model they go through."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from transformers import Qwen3Config, Qwen3Model

from oracle.founding import founding_case

VOCABULARY = 1000
WIDTH = 256


def founding(times: int = 1) -> list[int]:
    """The founding batch's 516 lengths, heavy with ones, over and over; any number of sequences by slicing."""
    return founding_case().lengths * times


def log_normal(count: int, mean: float = 64, longest: int = 512, seed: int = 0, spread: float = 0.8) -> list[int]:
    """Lengths of 1 to ``longest``, log-normal; spread: of their logarithms, before they are cut off."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lengths = (math.log(mean) - spread**2 / 2 + spread * normal).exp().round().clamp(1, longest)
    return [int(length) for length in lengths]


def uniform(count: int, longest: int = 512, seed: int = 0) -> list[int]:
    """Lengths of 1 to ``longest``, all equally likely."""
    return torch.randint(1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


WORKLOADS: dict[str, Callable[[], list[int]]] = {
    "W1": founding,  # 516 sequences, about 1,800 tokens
    "W2": lambda: log_normal(516),
    "W3": lambda: uniform(64),
    "W4": lambda: founding(8)[:4096],
}


def sequences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Token ids for sequences of these lengths."""
    ids = iter(torch.randint(3, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(seed)).tolist())
    return [[next(ids) for _ in range(length)] for length in lengths]


@cache
def qwen3(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Qwen3Model:
    """A Qwen3 of width 256 with 4 layers, 4 heads and 2 key-value heads; random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, use_cache=False,
        )  # fmt: skip
        return Qwen3Model(config).to(dtype).to(device).eval()
