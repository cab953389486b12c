"""Planted faults: the smallest wrong implementations, each of one kind."""
