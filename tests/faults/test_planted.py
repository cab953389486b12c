"""A law that kills nothing proves nothing: each is shown the fault it is for."""

from __future__ import annotations

import pytest

from impl import PaddingFree
from oracle.founding import founding_case, try_founding_batch
from oracle.laws import LAWS, Law
from oracle.suite import Status, check, try_law
from tests.faults.founding import StrictDecrease
from tests.faults.planted import FURTHER, PLANTED

# The smallest case each fault can show in, as the lengths of its sequences; None where several are as small.
SMALLEST: dict[str, list[int] | None] = {
    "boundaries.lengths_are_recovered": [1, 1],
    "boundaries.slots_at_the_tail_change_nothing": [1, 2],
    "boundaries.slots_after_each_sequence_change_nothing": [1, 1],
    "boundaries.cu_seqlens_give_the_lengths": [1, 1],
    "boundaries.what_cannot_be_split_is_refused": [1, 1],
    "boundaries.malformed_cu_seqlens_are_refused": [1, 1],
    "isolation.other_sequences_tokens_do_not_matter": [1, 1],
    "isolation.order_does_not_matter": [1, 1],
    "isolation.number_does_not_matter": None,
    "isolation.what_stands_in_slots_does_not_matter": [1, 1],
    "isolation.gradients_stay_within_the_sequence": [1, 1],
    "agreement.every_sequence_has_one_embedding": [1, 1],
    "agreement.embeddings_equal_the_padded_ones": [1, 2],
    "agreement.every_pooling_equals_the_padded_one": [1, 2],
    "agreement.embeddings_equal_each_sequence_alone": [1, 2],
    "agreement.the_last_token_is_pooled": [1, 2],
    "agreement.a_training_step_equals_the_padded_one": [1, 1, 1],
    "losses.infonce_equals_its_definition": [1, 1, 1],
    "losses.every_option_equals_its_definition": None,
    "losses.hard_negatives_equal_their_definition": None,
    "losses.matryoshka_equals_its_definition": None,
    "losses.the_papers_formula_equals_its_definition": None,
    "losses.cosine_similarity_equals_its_definition": [1, 1],
    "losses.contrastive_equals_its_definition": [1, 1],
    "losses.online_contrastive_equals_its_definition": [1, 1],
    "losses.the_order_of_groups_does_not_matter": None,
    "losses.labels_that_do_not_fit_are_refused": [1, 1, 1],
    "replay.a_chunked_loss_equals_the_whole_one": None,
    "replay.a_gradient_cache_equals_the_plain_step": [1, 1, 1],
    "ranks.loss_and_gradient_equal_one_process": [1] * 8,
    "ranks.mean_of_ranks_is_what_it_says": None,
    "slots.lengths_find_their_tokens_in_any_layout": [1, 1],
    "slots.what_stands_in_slots_stays_there": [1, 1],
    "slots.nan_in_slots_spoils_no_gradient": [1, 1, 1],
    "slots.pads_numbered_like_a_sequence_are_refused": [1, 2],
    "multimodal.mrope_rows_give_the_lengths": [1, 2],
    "multimodal.mrope_rows_of_no_sequence_are_refused": [1, 2],
    "multimodal.images_and_text_equal_the_padded_ones": [1, 1, 2],
    "multimodal.images_and_text_equal_each_sequence_alone": None,
    "sharding.split_then_gather_is_the_identity": [1, 1],
    "sharding.every_field_is_laid_out_alike": [1, 1],
    "sharding.what_stands_in_a_shards_slots_stays_there": [1, 1],
    "sharding.attention_over_shards_equals_the_whole": [1, 2],
    "sharding.ulysses_equals_one_process": [1, 1, 1],
    "sharding.a_ring_equals_one_process": [1, 1, 2],
    "sharding.ulysses_times_ring_equals_one_process": [1, 1, 2],
    "sharding.batches_beside_each_other_equal_one_process": [1, 1, 1, 1],
    "sharding.a_streaming_ring_is_within_a_grid_step": [1, 1, 2],
}


def test_every_law_has_a_planted_fault() -> None:
    assert {law.title for law in LAWS} == PLANTED.keys() == SMALLEST.keys()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.title)
def test_law_kills_its_fault_and_shrinks_it(law: Law) -> None:
    result = try_law(law, PLANTED[law.title](), "qwen3", examples=60)
    assert result.status is Status.BROKEN, f"{PLANTED[law.title].__doc__} survived {result.cases} cases"
    assert result.finding is not None
    lengths = result.finding.case.lengths
    if SMALLEST[law.title] is None:
        assert len(lengths) <= 12, lengths
    else:
        assert sorted(lengths) == sorted(SMALLEST[law.title] or []), result.finding


@pytest.mark.parametrize(("title", "fault"), FURTHER, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_further_faults_are_killed_too(title: str, fault: type[PaddingFree]) -> None:
    law = next(law for law in LAWS if law.title == title)
    assert try_law(law, fault(), "qwen3", examples=60).status is Status.BROKEN


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.title)
def test_law_holds_for_the_right_implementation_on_the_same_draws(law: Law) -> None:
    processes = any(surface in law.surfaces for surface in ("sharded_step", "streaming_step"))
    assert try_law(law, PaddingFree(), "qwen3", examples=3 if processes else 8).status is Status.HOLDS


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
