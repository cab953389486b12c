"""What must hold: one file a family, one function a law, its docstring the sentence."""

from oracle.laws import agreement, boundaries, isolation, losses, ranks, replay
from oracle.laws.law import LAWS, Broken, Law, VacuousError

__all__ = ["LAWS", "Broken", "Law", "VacuousError", "agreement", "boundaries", "isolation", "losses", "ranks", "replay"]

_FAMILIES = ("boundaries", "isolation", "agreement", "losses", "replay", "ranks")
LAWS.sort(key=lambda each: _FAMILIES.index(each.family))
