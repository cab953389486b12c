"""The exact-arithmetic mode."""
