"""What must hold: one file a family, one function a law, its docstring the sentence."""

from oracle.laws import agreement, boundaries, isolation, losses, multimodal, ranks, replay, sharding, slots
from oracle.laws.law import LAWS, Broken, HangError, Law, VacuousError

__all__ = [
    "LAWS",
    "Broken",
    "HangError",
    "Law",
    "VacuousError",
    "agreement",
    "boundaries",
    "isolation",
    "losses",
    "multimodal",
    "ranks",
    "replay",
    "sharding",
    "slots",
]

_FAMILIES = ("boundaries", "slots", "isolation", "agreement", "multimodal", "losses", "replay", "ranks", "sharding")
LAWS.sort(key=lambda each: _FAMILIES.index(each.family))
