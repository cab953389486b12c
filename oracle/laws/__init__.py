"""What must hold: one file a family, one function a law, its docstring the sentence."""

from oracle.laws import agreement, boundaries, isolation, losses, multimodal, ranks, replay, slots
from oracle.laws.law import LAWS, Broken, Law, VacuousError

__all__ = [
    "LAWS",
    "Broken",
    "Law",
    "VacuousError",
    "agreement",
    "boundaries",
    "isolation",
    "losses",
    "multimodal",
    "ranks",
    "replay",
    "slots",
]

_FAMILIES = ("boundaries", "slots", "isolation", "agreement", "multimodal", "losses", "replay", "ranks")
LAWS.sort(key=lambda each: _FAMILIES.index(each.family))
