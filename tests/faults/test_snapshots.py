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
from tests.faults.planted import PLANTED

# Exact arithmetic gives the same numbers on any machine. Left out: what names lines of code, or rounds.
SHOWN = [
    "boundaries.lengths_are_recovered",
    "boundaries.slots_at_the_tail_change_nothing",
    "boundaries.slots_after_each_sequence_change_nothing",
    "boundaries.what_cannot_be_split_is_refused",
    "boundaries.malformed_cu_seqlens_are_refused",
    "slots.lengths_find_their_tokens_in_any_layout",
    "slots.what_stands_in_slots_stays_there",
    "isolation.other_sequences_tokens_do_not_matter",
    "isolation.order_does_not_matter",
    "isolation.gradients_stay_within_the_sequence",
    "agreement.embeddings_equal_the_padded_ones",
    "agreement.a_training_step_equals_the_padded_one",
    "multimodal.mrope_rows_give_the_lengths",
    "losses.infonce_equals_its_definition",
    "losses.labels_that_do_not_fit_are_refused",
    "ranks.loss_and_gradient_equal_one_process",
    "sharding.split_then_gather_is_the_identity",
    "sharding.attention_over_shards_equals_the_whole",
    "sharding.ulysses_equals_one_process",
]


@pytest.mark.parametrize("title", SHOWN)
def test_a_counter_example_reads_well(title: str, snapshot: SnapshotAssertion) -> None:
    law = next(law for law in LAWS if law.title == title)
    result = try_law(law, PLANTED[title](), "qwen3", examples=60)
    assert result.finding is not None
    text = StringIO()
    report.finding(Console(file=text, width=120), result.finding, law.sentence, Path("FILE"))
    assert text.getvalue() == snapshot
