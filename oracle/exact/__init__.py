"""Exact arithmetic: sums that do not depend on their order, for any PyTorch code."""

from oracle.exact.grid import BudgetError, ExactError, Grid, PrecisionError, UnknownOperatorError
from oracle.exact.mode import exact, plain

__all__ = ["BudgetError", "ExactError", "Grid", "PrecisionError", "UnknownOperatorError", "exact", "plain"]
