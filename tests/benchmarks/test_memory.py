"""Time and peak memory, forward and backward, as the batch grows: the loss and pooling, ours beside the plain forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.alone import LOSSES, POOLINGS, measure

benchmark_only = pytest.mark.skipif("not config.getoption('--benchmark-only')", reason="only with --benchmark-only")
ROWS, WIDTH = 8, 256


def _grown(benchmark: Any, forms: list[str], counts: list[int], what: str, third: object, device: str) -> Any:
    """form -> count -> seconds, MiB and value; recorded."""

    def run() -> dict[str, dict[int, dict[str, float]]]:
        results = iter(measure([(what, form, count, third, WIDTH) for form in forms for count in counts], device))
        return {form: {count: next(results) for count in counts} for form in forms}

    found = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info["growth"] = {"of": f"{what} {third}" if what == "pooling" else what, "forms": found}
    return found


@benchmark_only
def test_the_loss_in_chunks_takes_a_fraction_of_the_plain_forms_memory(benchmark: Any, full: bool, device: str) -> None:
    """The plain form's similarities grow with the square of the batch; in chunks they do not."""
    counts = [512, 2048, 8192] if full else [512, 2048]
    found = _grown(benchmark, list(LOSSES), counts, "loss", ROWS, device)
    for form in LOSSES:
        for count in counts:
            assert found[form][count]["value"] == pytest.approx(found["plain"][count]["value"], rel=1e-5)
    most = {form: each[counts[-1]]["mib"] for form, each in found.items()}
    assert most["chunks of 64"] <= most["plain"] / 3, most


@benchmark_only
@pytest.mark.parametrize("how", ["last", "mean"])
def test_pooling_from_the_stream_takes_less_than_padding_again(
    benchmark: Any, how: str, full: bool, device: str
) -> None:
    counts = [4096, 16384, 65536] if full else [4096, 16384]
    found = _grown(benchmark, list(POOLINGS), counts, "pooling", how, device)
    for count in counts:
        ours, padded = found["ours"][count], found["padded again"][count]
        assert ours["value"] == pytest.approx(padded["value"], rel=1e-3)
        assert ours["mib"] <= padded["mib"], found
    assert found["ours"][counts[-1]]["s"] <= found["padded again"][counts[-1]]["s"], found
