"""What the strategies of losses, ranks and long texts draw, and how often."""

from __future__ import annotations

import pytest
from hypothesis.strategies import SearchStrategy

from oracle.case import Case
from oracle.laws.ranks import groups_of_ranks
from oracle.ranks import row_counts
from oracle.strategies import long_cases, loss_cases
from tests.drawing import Features, check_features, drawn

DRAWS = 400

GROUPS: Features = {
    "a group without negatives": (0.30, lambda c: any(not g.negatives for g in c.groups)),
    "groups of different sizes": (0.40, lambda c: len({len(g.negatives) for g in c.groups}) > 1),
    "one group": (0.02, lambda c: len(c.groups) == 1),
    "four groups or more": (0.30, lambda c: len(c.groups) >= 4),
    "a label other than 1": (0.30, lambda c: any(g.label != 1 for g in c.groups)),
    "the rest of the batch left out": (0.10, lambda c: not c.options.use_batch),
    "fake negatives masked": (0.25, lambda c: c.options.mask_fake_negative),
    "other anchors as candidates": (0.25, lambda c: c.options.include_qq),
    "documents against the positive": (0.25, lambda c: c.options.include_dd),
    "other anchors, nothing else": (
        0.06,
        lambda c: (
            c.options.include_qq
            and c.options.use_batch
            and not c.options.include_dd
            and not c.options.mask_fake_negative
        ),
    ),
    "a margin of none": (0.15, lambda c: c.options.fake_negative_margin == 0),
}

HARD: Features = {
    "too few negatives, drawn again": (
        0.40,
        lambda c: any(len(g.negatives) < (c.options.hard_negatives or 0) for g in c.groups),
    ),
    "too many, cut off": (0.30, lambda c: any(len(g.negatives) > (c.options.hard_negatives or 0) for g in c.groups)),
}

RANKS: Features = {
    "ranks with different numbers of groups": (0.50, lambda c: len({len(s) for s in groups_of_ranks(c)}) > 1),
    "ranks with different numbers of rows": (0.60, lambda c: len(set(row_counts(groups_of_ranks(c)))) > 1),
    "ranks with the same": (0.10, lambda c: len(set(row_counts(groups_of_ranks(c)))) == 1),
}

LONG: Features = {
    "beyond 256 tokens": (0.60, lambda c: max(c.lengths) > 256),
    "one beyond and one of one token": (0.12, lambda c: max(c.lengths) > 256 and 1 in c.lengths),
    "exactly 256 or one more": (0.40, lambda c: any(n in (256, 257) for n in c.lengths)),
    "another order": (0.30, lambda c: c.stream.arranged(len(c.lengths)) != tuple(range(len(c.lengths)))),
}


@pytest.mark.parametrize(
    ("strategy", "features"),
    [
        (loss_cases("infonce"), GROUPS),
        (loss_cases("hard_negatives"), HARD),
        (loss_cases("infonce", least_groups=4), RANKS),
        (long_cases(256), LONG),
    ],
    ids=["groups", "hard negatives", "ranks", "long texts"],
)
def test_features_are_drawn_often_enough(strategy: SearchStrategy[Case], features: Features) -> None:
    check_features(features, drawn(strategy, DRAWS))
