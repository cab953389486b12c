"""Sequence parallelism: one packed stream over several ranks, by Ulysses, by ring, or by both.

The ranks that share a stream form a ring of ``ring`` times ``ulysses``; rank = ring rank * ulysses + Ulysses
rank. Every sequence is padded to a multiple of 2 ring and cut into as many chunks, of which ring rank r holds
chunks r and 2 ring - 1 - r (zigzag: causal work is even); what a ring rank holds is padded at its tail and cut
into ``ulysses`` equal pieces. Around attention, the Ulysses ranks exchange tokens for heads (Jacobs et al. 2023),
and keys and values go round the ring (Liu et al. 2023). ``Plan`` says where every token is; ranks compute their
real tokens alone, so nothing in a slot can reach anything.
"""

from impl.sharding.model import encode, hidden_states, loss
from impl.sharding.plan import Plan
from impl.sharding.ring import sharded_attention
from impl.sharding.wire import Processes, Ranks, Simulated, Wire

__all__ = [
    "Plan",
    "Processes",
    "Ranks",
    "Simulated",
    "Wire",
    "encode",
    "hidden_states",
    "loss",
    "sharded_attention",
]
