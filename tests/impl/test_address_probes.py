"""Address probes: attention whose right answer is an exact integer in any precision.

Each query's softmax saturates on one designated key, and values name their keys. A query's best match of
all lies in another sequence, so any leak, or any boundary in the wrong place, shows as another integer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from impl import attention, pack
from impl.packing import Packed
from impl.sharding import Plan, Simulated, sharded_attention

MIXES = [[1, 1], [1, 2, 1], [3, 1, 1, 5], [1] * 9, [16, 1, 17, 1, 15], [1, 40, 1, 1]]
HALF = [torch.float16, torch.bfloat16]


def probe(
    lengths: Sequence[int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Packed, Tensor, Tensor, Tensor, Tensor]:
    """A packed stream with q, k, v [T, heads, 64] and the expected output.

    Every token of a sequence looks for that sequence's first token: its query is 16 times that key's code.
    The same code stands, twice as strong, on the next sequence's last key. Codes are +-1 rows of a
    Sylvester matrix of order 64, so that different codes are orthogonal; a value is its key's number.
    """
    packed = pack([[7] * length for length in lengths], "given")
    codes = torch.ones(1, 1)
    for _ in range(6):
        codes = torch.cat([torch.cat([codes, codes], 1), torch.cat([codes, -codes], 1)])
    total = len(packed.input_ids)
    q, k = torch.zeros(total, 64), torch.zeros(total, 64)
    v = torch.arange(total).unsqueeze(1).expand(total, 64).float()
    expected = torch.empty(total)
    starts = packed.cu_seqlens.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        q[start:end] = 16 * codes[i]
        k[start] += codes[i]
        following = (i + 1) % len(lengths)
        if len(lengths) > 1:
            k[starts[following + 1] - 1] += 2 * codes[i]
        expected[start:end] = start
    heads = [x.unsqueeze(1).expand(total, 2, 64).to(device, dtype).contiguous() for x in (q, k, v)]
    return packed.to(device), heads[0], heads[1], heads[2], expected.to(device)


def check(
    backend: str, lengths: Sequence[int], dtype: torch.dtype, window: tuple[int, int], device: str = "cpu"
) -> bool:
    packed, q, k, v, expected = probe(lengths, dtype, device)
    out = attention.BACKENDS[backend](q, k, v, packed, window, 1.0)
    return bool((out.float() == expected[:, None, None]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("lengths", MIXES, ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_sdpa_reads_the_designated_key(lengths: list[int], dtype: torch.dtype, window: tuple[int, int]) -> None:
    assert check("sdpa", lengths, dtype, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_shards_read_the_designated_key(ulysses: int, ring: int, dtype: torch.dtype, window: tuple[int, int]) -> None:
    for lengths in MIXES:
        packed, q, k, v, expected = probe(lengths, dtype)
        wire = Simulated(Plan(packed.lengths, ulysses, ring))
        shares = [(q[held], k[held], v[held]) for held in wire.plan.tokens]
        for streaming in (True, False):
            found = wire.plan.collected(sharded_attention(wire, shares, window, 1.0, streaming))
            assert found.dtype is dtype
            assert bool((found.float() == expected[:, None, None]).all()), (lengths, streaming)


@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_a_lost_boundary_shows_as_another_integer(lengths: list[int]) -> None:
    """The founding fault's boundaries: neighbouring one-token sequences merged."""
    _packed, q, k, v, expected = probe(lengths, torch.float32)
    merged = pack([[7] * (lengths[0] + lengths[1]), *[[7] * n for n in lengths[2:]]], "given")
    out = attention.sdpa(q, k, v, merged, (-1, -1), 1.0)
    assert not bool((out == expected[:, None, None]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lengths", MIXES, ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flash_attn"])
def test_every_back_end_on_cuda_reads_the_designated_key(
    backend: str, lengths: list[int], dtype: torch.dtype, window: tuple[int, int]
) -> None:
    if backend == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    assert check(backend, lengths, dtype, window, "cuda")
