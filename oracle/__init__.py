"""The oracle: what a padded embedding trainer computes, in exact arithmetic, and whether yours agrees."""

from oracle.exact import exact

__all__ = ["exact"]
