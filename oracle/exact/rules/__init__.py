"""Every operator the exact mode knows, one small function each; importing this fills the table."""

from oracle.exact.rules import attention, elementwise, normalisation, products, softmax, sums
from oracle.exact.rules.passes import PASSES
from oracle.exact.rules.table import RULES

__all__ = ["PASSES", "RULES", "attention", "elementwise", "normalisation", "products", "softmax", "sums"]
