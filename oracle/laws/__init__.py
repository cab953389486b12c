"""What must hold: one file a family, one function a law, its docstring the sentence."""

from oracle.laws import agreement, boundaries, isolation, losses
from oracle.laws.law import LAWS, Broken, Law, VacuousError

__all__ = ["LAWS", "Broken", "Law", "VacuousError", "agreement", "boundaries", "isolation", "losses"]

_FAMILIES = ("boundaries", "isolation", "agreement", "losses")
LAWS.sort(key=lambda each: _FAMILIES.index(each.family))
