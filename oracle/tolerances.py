"""Every bound of the suite that is not zero, beside what was measured on either side of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """noise: the greatest difference of right computations, measured. bound: what a law allows. fault: the
    smallest difference that a planted fault made, measured. Tests measure noise and fault again."""

    noise: float
    bound: float
    fault: float


# A running log-sum-exp in float64 throughout: embeddings and loss absolute, gradients over their largest or 1.
STREAMING = Tolerance(noise=3e-14, bound=2.0**-36, fault=1e-9)

NUMERIC: dict[tuple[str, str], Tolerance] = {}
