"""Restarts of dead processes: how often, and when."""

from unified_cache.cluster.restarts import DELAYS_S, STABLE_S, ProcessPhase, Restarts


def die_and_start(restarts: Restarts, now_s: float) -> float:
    """Let it die at ``now_s`` and start as soon as it may; return when that is."""
    restarts.note_ended(now_s)
    delay_s = next(delay_s for delay_s in DELAYS_S if restarts.is_due(now_s + delay_s))
    assert not restarts.is_due(now_s)
    restarts.note_started(now_s + delay_s)
    return now_s + delay_s


def test_pauses_grow_and_then_the_process_is_lost() -> None:
    restarts = Restarts(0.0)
    now_s = 0.0
    pauses: list[float] = []
    while restarts.phase is ProcessPhase.RUNNING and len(pauses) < len(DELAYS_S):
        started_s = die_and_start(restarts, now_s)
        pauses.append(started_s - now_s)
        now_s = started_s + 1.0
    assert [round(pause, 6) for pause in pauses] == list(DELAYS_S)
    restarts.note_ended(now_s)
    assert restarts.phase is ProcessPhase.LOST
    assert not restarts.is_due(now_s + 1e9)
    assert restarts.count == len(DELAYS_S)


def test_a_process_that_ran_for_long_has_all_its_restarts_again() -> None:
    restarts = Restarts(0.0)
    now_s = 0.0
    for _ in range(3 * len(DELAYS_S)):
        now_s = die_and_start(restarts, now_s + STABLE_S)
    assert restarts.phase is ProcessPhase.RUNNING


def test_a_restart_that_fails_counts_as_a_death() -> None:
    restarts = Restarts(0.0)
    for _ in range(1 + len(DELAYS_S)):
        assert restarts.phase is not ProcessPhase.LOST
        restarts.note_ended(STABLE_S / 2)
    assert restarts.phase is ProcessPhase.LOST
    assert restarts.count == 0
