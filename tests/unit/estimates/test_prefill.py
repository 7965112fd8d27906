"""Time of a token: a moving average over requests that an engine has computed."""

import math

import pytest

from tests.support.clock import ManualClock
from unified_cache.controller.estimates.speeds import KNOWN_MIN, PrefillTime


def computed(prefill: PrefillTime, clock: ManualClock, tokens: int, seconds: float, times: int = 1) -> None:
    for number in range(times):
        prefill.begin(number)
        clock.now_s += seconds
        prefill.end(number, tokens)


def test_a_token_takes_what_it_took_lately() -> None:
    clock = ManualClock()
    prefill = PrefillTime(clock)
    computed(prefill, clock, 100, 1.0, 20)
    assert prefill.token_s == pytest.approx(0.01)
    computed(prefill, clock, 100, 5.0, 20)
    assert prefill.token_s == pytest.approx(0.05, rel=0.02)


def test_a_long_request_weighs_more_than_a_short_one() -> None:
    clock = ManualClock()
    prefill = PrefillTime(clock)
    for _ in range(20):
        computed(prefill, clock, 1, 0.1)
        computed(prefill, clock, 1_000, 1.0)
    assert prefill.token_s == pytest.approx(1.1 / 1_001, rel=0.03)


def test_nothing_is_known_before_some_requests_have_computed_anything() -> None:
    clock = ManualClock()
    prefill = PrefillTime(clock)
    computed(prefill, clock, 100, 1.0, KNOWN_MIN - 1)
    computed(prefill, clock, 0, 1.0)  # found whole
    computed(prefill, clock, 100, 0.0)  # by a clock that stands still
    computed(prefill, clock, 100, -1.0)
    prefill.end("never began", 100)
    assert math.isnan(prefill.token_s)
    computed(prefill, clock, 100, 1.0)
    assert prefill.token_s == pytest.approx(0.01)


def test_a_request_that_computes_nothing_is_forgotten() -> None:
    prefill = PrefillTime(ManualClock())
    for request in ("first", "second"):
        prefill.begin(request)
    prefill.leave("first")
    assert prefill.requests() == {"second"}
    prefill.leave_all()
    assert prefill.requests() == set()
