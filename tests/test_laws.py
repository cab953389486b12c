"""Every law on the implementation under test, on every model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis.database import ExampleDatabase

from oracle.contract import offers
from oracle.laws import LAWS, Law
from oracle.models import MODELS, kind
from oracle.suite import Status, canary, shares, try_law

# The default model gets all cases; each other one a share, for it only adds what its own layers do.
OTHER_SHARE = 0.1


# Of the laws in real processes, a case costs several times what others do.
SHARDED = ("mistral", "bert", "qwen3-moe")


def _model_matters(law: Law, model: str) -> bool:
    if kind(model).longest <= law.draw.get("beyond", 0):
        return False
    if law.family == "sharding":
        return "sharded_step" in law.surfaces and model in SHARDED
    return law.family in ("isolation", "agreement")


def planned(examples: int) -> dict[tuple[str, str], int]:
    """How many cases each law draws for each model, of ``examples`` for the default one."""
    wanted = shares(LAWS, examples)
    return {
        (law.title, model): wanted[law.title] if model == "qwen3" else max(3, round(wanted[law.title] * OTHER_SHARE))
        for law, model in PAIRS
    }


PAIRS = [(law, model) for law in LAWS for model in MODELS if model == "qwen3" or _model_matters(law, model)]


@pytest.mark.parametrize(("law", "model"), PAIRS, ids=[f"{law.title}-{model}" for law, model in PAIRS])
def test_law(
    law: Law,
    model: str,
    implementation: Any,
    law_examples: int,
    law_seed: int,
    law_database: ExampleDatabase | None,
) -> None:
    examples = planned(law_examples)[law.title, model]
    result = try_law(law, implementation, model, examples, law_seed, database=law_database)
    if result.status is Status.DECLINED or not any(offers(implementation, surface) for surface in law.surfaces):
        pytest.skip(f"not offered: {' or '.join(law.surfaces)}")
    if result.finding:
        found = result.finding
        lines = [
            law.sentence,
            found.summary,
            *found.details,
            f"smallest case: {found.case.to_json()}",
            f"seed {law_seed}",
        ]
        pytest.fail("\n".join(lines), pytrace=False)
    assert result.cases > 0


@pytest.mark.parametrize("model", MODELS)
def test_reference_agrees_with_itself_under_any_padding(model: str) -> None:
    assert 0 < canary(model) <= 53


def test_laws_have_sentences_and_distinct_titles() -> None:
    assert len({law.title for law in LAWS}) == len(LAWS)
    for law in LAWS:
        assert law.sentence.endswith("."), law.title
        assert law.surfaces, law.title
