"""One way between tiers: what is in flight before a transfer is a part of its time."""

import pytest

from tests.support.clock import ManualClock
from unified_cache.estimates.leg import TransferLeg

MIB = 1 << 20


def timed(leg: TransferLeg, clock: ManualClock, payload_bytes: int, seconds: float) -> None:
    with leg.moving(payload_bytes) as moved:
        clock.now_s += seconds
        leg.note(moved, payload_bytes, clock.now_s)


def test_what_is_queued_before_a_transfer_is_a_part_of_its_time() -> None:
    clock = ManualClock()
    leg = TransferLeg(clock)
    for size in (1, 2, 3, 4, 6, 8):  # behind 20 MiB, at 100 MiB/s
        with leg.moving(20 * MIB):
            timed(leg, clock, size * MIB, (20 + size) / 100)
    fitted = leg.fitted
    assert fitted is not None
    latency_s, byte_s = fitted.weights
    assert latency_s + byte_s * 24 * MIB == pytest.approx(0.24, rel=0.02)
    assert latency_s + byte_s * 50 * MIB == pytest.approx(0.50, rel=0.1), "and not 20 MiB more"
    assert leg.in_flight_bytes == 0


def test_expectations_are_held_against_what_was_taken() -> None:
    clock = ManualClock()
    leg = TransferLeg(clock)
    for size in (1, 2, 4, 8):
        timed(leg, clock, size * MIB, size / 100)
    assert leg.stats().transfers_count == 0, "nothing was expected of them"
    timed(leg, clock, 10 * MIB, 0.15)
    stats = leg.stats()
    assert stats.transfers_count == 1
    assert stats.expected_s == pytest.approx(0.10, rel=0.02)
    assert stats.taken_s == pytest.approx(0.15)
    assert stats.error_ratio == pytest.approx(1 / 3, rel=0.05)


def test_a_transfer_that_brought_nothing_or_took_no_time_counts_for_nothing() -> None:
    clock = ManualClock()
    leg = TransferLeg(clock)
    for _ in range(10):
        timed(leg, clock, MIB, 0.0)
        with leg.moving(MIB) as moved:
            clock.now_s += 1
            leg.note(moved, 0, clock.now_s)
    assert leg.fitted is None


def test_a_leg_that_nobody_asks_times_nothing() -> None:
    clock = ManualClock()
    leg = TransferLeg(clock, expects=False)
    for size in range(1, 20):
        timed(leg, clock, size * MIB, size / 100)
    assert leg.fitted is None
    assert leg.stats().taken_s == 0
