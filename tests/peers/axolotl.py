"""axolotl: its ways to find sequences in position ids, one for each kernel that needs them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from axolotl.monkeypatch.attention.sdpa_varlen import _block_diagonal_causal_mask
from axolotl.monkeypatch.models.gated_delta_net_ops import _cu_seqlens_from_position_ids
from axolotl.monkeypatch.models.mamba_utils import get_seq_idx
from axolotl.monkeypatch.utils import get_cu_seqlens_from_pos_ids
from torch import Tensor


class _FromPositions:
    """Lengths from one row of position ids."""

    __version__ = version("axolotl")

    def boundaries(self, position_ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> list[int]:
        """Of the sequences in stream order."""
        if position_ids is None or position_ids.dim() > 1:
            raise NotImplementedError
        found: list[int] = self.found(position_ids).tolist()
        return found

    def found(self, position_ids: Tensor) -> Any:
        """Their lengths."""
        raise NotImplementedError


class CuSeqlens(_FromPositions):
    """get_cu_seqlens_from_pos_ids, of its xformers attention and StableLM."""

    name = "axolotl, get_cu_seqlens_from_pos_ids"

    def found(self, position_ids: Tensor) -> Any:
        """Differences of the cumulative lengths."""
        return get_cu_seqlens_from_pos_ids(position_ids)[0][0].diff()


class GatedDelta(_FromPositions):
    """Of the gated delta net, Qwen3-Next's linear attention."""

    name = "axolotl, gated delta net"

    def found(self, position_ids: Tensor) -> Any:
        """Likewise."""
        return _cu_seqlens_from_position_ids(position_ids[None]).diff()


class SequenceIndex(_FromPositions):
    """get_seq_idx, for Mamba's kernels."""

    name = "axolotl, get_seq_idx"

    def found(self, position_ids: Tensor) -> Any:
        """Tokens with each index."""
        return get_seq_idx(position_ids[None])[0].unique_consecutive(return_counts=True)[1]


class SdpaMask(_FromPositions):
    """The mask of its sdpa attention where the varlen kernel cannot be had."""

    name = "axolotl, block-diagonal mask"

    def found(self, position_ids: Tensor) -> Any:
        """Tokens whose rows begin at the same column."""
        mask = _block_diagonal_causal_mask(position_ids, len(position_ids))[0, 0]
        return mask.int().argmax(1).unique_consecutive(return_counts=True)[1]
