"""A few seconds of what ``make soak-service`` does for minutes."""

from tests.soak.service import soak
from tests.soak.slow_flood import FloodSize

SECONDS = 10.0
CLIENTS = 16
SIZE = FloodSize(half_open=200, trickled=4, idle=50)


def test_a_service_answers_under_a_load_that_goes_wrong_and_over_a_store_that_fails() -> None:
    report = soak(SECONDS, CLIENTS, SIZE)
    assert report.missed == [], report.json()
    assert report.tally.clean > 0
    assert report.tally.pages > 0
    assert report.faults, "the store had no faults"
    assert report.tally.codes["RESOURCE_EXHAUSTED"] > 0
    assert report.flood.calls_ended >= SIZE.half_open // 2, "calls of headers alone were let stand"
    assert report.flood.connections_begun >= SIZE.idle
