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

# Embeddings in low precision (``oracle.numeric``): the greatest entry's distance from the float64 reference, noise over
# 10,000 clean cases of each model, fault the smallest of eight planted faults' greatest effects; measured by
# python -m tests.quality.numeric. Greatest effect, since a run sees it: single cases may show less.
NUMERIC: dict[tuple[str, str], Tolerance] = {
    ("float32", "qwen3"): Tolerance(noise=9.5e-07, bound=2.0**-10.5, fault=0.49),
    ("bfloat16", "qwen3"): Tolerance(noise=0.033, bound=2.0**-3, fault=0.49),
    ("float16", "qwen3"): Tolerance(noise=0.0032, bound=2.0**-4.5, fault=0.49),
    ("float32", "llama"): Tolerance(noise=2e-06, bound=2.0**-10, fault=0.5),
    ("bfloat16", "llama"): Tolerance(noise=0.05, bound=2.0**-2.5, fault=0.5),
    ("float16", "llama"): Tolerance(noise=0.0052, bound=2.0**-4.5, fault=0.5),
    ("float32", "mistral"): Tolerance(noise=1.5e-06, bound=2.0**-10, fault=0.51),
    ("bfloat16", "mistral"): Tolerance(noise=0.044, bound=2.0**-2.5, fault=0.51),
    ("float16", "mistral"): Tolerance(noise=0.0051, bound=2.0**-4.5, fault=0.51),
    ("float32", "gemma3"): Tolerance(noise=1.9e-06, bound=2.0**-10, fault=0.45),
    ("bfloat16", "gemma3"): Tolerance(noise=0.073, bound=2.0**-2.5, fault=0.45),
    ("float16", "gemma3"): Tolerance(noise=0.01, bound=2.0**-4, fault=0.45),
    ("float32", "qwen3-moe"): Tolerance(noise=1.1e-06, bound=2.0**-10.5, fault=0.52),
    ("float32", "qwen3-next"): Tolerance(noise=8.8e-07, bound=2.0**-11, fault=0.37),
    ("bfloat16", "qwen3-next"): Tolerance(noise=0.028, bound=2.0**-3.5, fault=0.37),
    ("float16", "qwen3-next"): Tolerance(noise=0.0031, bound=2.0**-5, fault=0.37),
    ("float32", "lfm2"): Tolerance(noise=1.2e-06, bound=2.0**-11, fault=0.27),
    ("bfloat16", "lfm2"): Tolerance(noise=0.044, bound=2.0**-3, fault=0.28),
    ("float16", "lfm2"): Tolerance(noise=0.003, bound=2.0**-5, fault=0.27),
    ("float32", "bert"): Tolerance(noise=6.6e-07, bound=2.0**-11, fault=0.46),
    ("bfloat16", "bert"): Tolerance(noise=0.016, bound=2.0**-3.5, fault=0.46),
    ("float16", "bert"): Tolerance(noise=0.0013, bound=2.0**-5.5, fault=0.46),
    ("float32", "xlm-roberta"): Tolerance(noise=4.4e-07, bound=2.0**-11.5, fault=0.38),
    ("bfloat16", "xlm-roberta"): Tolerance(noise=0.012, bound=2.0**-4, fault=0.38),
    ("float16", "xlm-roberta"): Tolerance(noise=0.0012, bound=2.0**-5.5, fault=0.38),
    ("float32", "modernbert"): Tolerance(noise=2.6e-06, bound=2.0**-9.5, fault=0.53),
    ("bfloat16", "modernbert"): Tolerance(noise=0.041, bound=2.0**-3, fault=0.53),
    ("float16", "modernbert"): Tolerance(noise=0.0054, bound=2.0**-4, fault=0.53),
}
