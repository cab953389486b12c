"""The suite as pytest."""
