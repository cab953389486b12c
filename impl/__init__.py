"""Padding-free embedding training: packing, variable-length attention, pooling, losses."""

from impl.encoder import encode
from impl.losses import infonce
from impl.packing import Packed, boundaries, from_stream, pack
from impl.surface import PaddingFree

__all__ = ["Packed", "PaddingFree", "boundaries", "encode", "from_stream", "infonce", "pack"]
