"""No false alarms: the record of 100,000 clean cases is there, and no older than the laws."""

from __future__ import annotations

from oracle.laws import LAWS
from tests.conftest import EXAMPLES
from tests.quality import clean
from tests.test_laws import planned


def test_a_hundred_thousand_clean_cases_gave_no_alarm() -> None:
    record = clean.load()
    assert record.keys() == {law.title for law in LAWS}, "nox -s clean writes what is missing"
    assert sum(each.cases for each in record.values()) >= 100_000
    assert [title for title, each in record.items() if each.alarms] == []


def test_the_record_is_no_older_than_the_laws() -> None:
    old = [law.title for law in clean.stale(clean.load())]
    assert old == [], f"laws changed since their clean cases were counted: {old}; nox -s clean counts them anew"


def test_the_default_run_tries_five_thousand_cases() -> None:
    assert sum(planned(EXAMPLES["dev"]).values()) >= 5_000
