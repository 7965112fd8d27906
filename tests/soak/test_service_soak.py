"""A few seconds of what ``make soak-service`` does for minutes."""

from tests.soak.service import soak

SECONDS = 10.0
CLIENTS = 16


def test_a_service_answers_under_load_and_over_a_store_that_fails() -> None:
    report = soak(SECONDS, CLIENTS)
    assert report.missed == [], report.json()
    assert report.counts["clean"] > 0
    assert report.counts["pages"] > 0
    assert report.faults, "the store had no faults"
