"""A law that kills nothing proves nothing: each is shown the faults it is for, and shrinks them."""

from __future__ import annotations

import pytest

from impl import PaddingFree
from oracle.founding import founding_case, try_founding_batch
from oracle.laws import LAWS, Law
from oracle.suite import Status, check, try_law
from tests.faults.base import Padded
from tests.faults.catalogue import KINDS, Fault, catalogue
from tests.faults.founding import StrictDecrease

BY_TITLE = {law.title: law for law in LAWS}
FAULTS = catalogue()
EXPECTED = [(fault, title) for fault in FAULTS for title in fault.laws]


def test_every_law_has_a_planted_fault() -> None:
    assert {title for fault in FAULTS for title in fault.laws} == BY_TITLE.keys()


def test_the_catalogue_is_as_wide_as_it_says() -> None:
    assert len(FAULTS) >= 80
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert len({fault.link for fault in FAULTS if fault.link}) >= 50
    assert {fault.kind for fault in FAULTS} == set(KINDS)
    assert sum(fault.smallest is not None for fault in FAULTS) >= 20
    for fault in FAULTS:
        assert fault.sentence.endswith("."), fault.id


@pytest.mark.parametrize(("fault", "title"), EXPECTED, ids=[f"{fault.id}-{title}" for fault, title in EXPECTED])
def test_a_fault_is_killed_by_its_law_and_shrunk(fault: Fault, title: str) -> None:
    with fault.patch():
        result = try_law(BY_TITLE[title], fault.implementation(), fault.model, examples=100)
    assert result.status is Status.BROKEN, f"{fault.sentence} survived {result.cases} cases"
    assert result.finding is not None
    lengths = result.finding.case.lengths
    if title == fault.laws[0] and fault.smallest is not None:
        assert sum(lengths) == sum(fault.smallest), result.finding
    else:
        most = 26 if title.startswith("ranks.") else 12  # four groups at least, in processes: few shrinks fit the time
        assert len(lengths) <= most, lengths


PROCESSES = ("rank_loss", "sharded_step", "streaming_step")
BRIEF = [
    pytest.param(law, marks=[pytest.mark.slow] if set(law.surfaces) & set(PROCESSES) else [], id=law.title)
    for law in LAWS
]


@pytest.mark.parametrize("law", BRIEF)
def test_law_holds_for_the_right_implementation_on_the_same_draws(law: Law) -> None:
    examples = 3 if set(law.surfaces) & set(PROCESSES) else 8
    assert try_law(law, PaddingFree(), "qwen3", examples).status is Status.HOLDS


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("model", ["qwen3", "xlm-roberta", "lfm2"])
def test_the_padded_implementation_that_faults_are_planted_in_is_right(model: str, side: str) -> None:
    padded = Padded()
    padded.side = side
    for law in LAWS:
        if law.family in ("agreement", "isolation"):
            result = try_law(law, padded, model, examples=4)
            assert result.status is Status.HOLDS, result.finding


def test_the_founding_fault_is_found_at_once_and_shrinks_to_two_sequences() -> None:
    report = check(StrictDecrease(), examples=200)
    broken = [result for result in report.results if result.status is Status.BROKEN]
    assert [result.law for result in broken] == ["boundaries.lengths_are_recovered"]
    finding = broken[0].finding
    assert finding is not None
    assert finding.case.lengths in ([1, 1], [1, 2])
    assert finding.summary == "2 sequences packed, 1 found; the first wrong one is sequence 0"
    assert finding.details == ["as packed  |0|0|  lengths [1, 1]", "as found   |0 0|  lengths [2]"]
    assert f"{len(LAWS)} laws, 1 broken" in report.verdict


def test_the_founding_batch_is_refused_with_counts() -> None:
    result = try_founding_batch(StrictDecrease())
    assert result.agrees is False
    assert "516 sequences, 253 of one token, 514 labels" in result.told
    assert "263 embeddings do not fit 514 labels in 2 groups" in result.told
    assert "Group 1 is the first without all its rows" in result.told


def test_the_founding_batch_is_the_reports_own_shape() -> None:
    case = founding_case()
    assert [len(group.negatives) for group in case.groups] == [256, 256]
    assert len(case.sequences) == 516
    assert len(case.labels) == 514
    assert case.lengths.count(1) >= 12
