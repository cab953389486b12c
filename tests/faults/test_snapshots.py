"""What a stranger reads when a law is broken: the wording is under regression, and reads well.

After a change of wording: pytest tests/faults/test_snapshots.py --snapshot-update, and read what changed.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from oracle import report
from oracle.laws import LAWS
from oracle.suite import try_law
from tests.faults.catalogue import catalogue

# Exact arithmetic gives the same numbers on any machine. Left out: what names lines of code, or rounds.
SHOWN = {
    "boundaries.lengths_are_recovered": "strict-decrease",
    "boundaries.slots_at_the_tail_change_nothing": "tail-slots-counted",
    "boundaries.slots_after_each_sequence_change_nothing": "padded-segments",
    "boundaries.what_cannot_be_split_is_refused": "zeros-begin",
    "boundaries.malformed_cu_seqlens_are_refused": "plain-differences",
    "slots.lengths_find_their_tokens_in_any_layout": "unpadded-slices",
    "slots.what_stands_in_slots_stays_there": "slots-multiplied-away",
    "isolation.other_sequences_tokens_do_not_matter": "no-boundaries-in-attention",
    "isolation.order_does_not_matter": "stream-order",
    "isolation.gradients_stay_within_the_sequence": "batch-statistics",
    "agreement.embeddings_equal_the_padded_ones": "second-last-pooled",
    "agreement.a_training_step_equals_the_padded_one": "half-gradient",
    "multimodal.mrope_rows_give_the_lengths": "temporal-row",
    "losses.infonce_equals_its_definition": "temperature-multiplied",
    "losses.labels_that_do_not_fit_are_refused": "surplus-rows-ignored",
    "ranks.loss_and_gradient_equal_one_process": "gradient-over-ranks",
    "sharding.split_then_gather_is_the_identity": "unpadded-shard-slices",
    "sharding.attention_over_shards_equals_the_whole": "positions-within-the-shard",
    "sharding.ulysses_equals_one_process": "gradient-over-shards",
}


@pytest.mark.parametrize("title", SHOWN)
def test_a_counter_example_reads_well(title: str, snapshot: SnapshotAssertion) -> None:
    law = next(law for law in LAWS if law.title == title)
    fault = next(fault for fault in catalogue() if fault.id == SHOWN[title])
    with fault.patch():
        result = try_law(law, fault.implementation(), fault.model, examples=60)
    assert result.finding is not None
    text = StringIO()
    report.finding(Console(file=text, width=120), result.finding, law.sentence, Path("FILE"))
    assert text.getvalue() == snapshot
