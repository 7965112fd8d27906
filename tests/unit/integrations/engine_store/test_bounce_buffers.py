"""Bounce buffers against a naive model: no span overlaps another, none is lost, quarantine returns."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clock import ManualClock
from unified_cache.core.errors import ConfigError
from unified_cache.integrations.engine_store.buffers import BounceBuffer, BounceMemory

PAGE = 4096


class LateCall:
    """A call to a store that returns when the test says so."""

    name = "get"
    started_s = 0.0

    def __init__(self, *, returned: bool = False) -> None:
        self.returned = returned

    def wait(self, timeout_s: float) -> bool:
        return self.returned


@pytest.mark.parametrize("seed", range(20))
def test_spans_never_overlap_and_every_byte_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    pages_max = rng.choice([1, 4, 16, 64])
    memory = BounceMemory.allocate(pages_max * PAGE, ManualClock())
    owner: list[BounceBuffer | None] = [None] * pages_max  # the model: who has each page of memory
    lent: list[BounceBuffer] = []
    late: list[tuple[BounceBuffer, LateCall]] = []
    for _ in range(300):
        match rng.randrange(4):
            case 0 | 1:
                size = rng.randrange(1, pages_max * PAGE + 1)
                pages = -(-size // PAGE)
                span = memory.reserve(size, 0.0)
                fits = any(not any(owner[start : start + pages]) for start in range(pages_max - pages + 1))
                assert (span is not None) == fits
                if span is not None:
                    held = slice(span.start // PAGE, span.end // PAGE)
                    assert span.size_bytes == pages * PAGE == len(span.view)
                    assert not any(owner[held])
                    owner[held] = [span] * pages
                    lent.append(span)
            case 2 if lent:
                span = lent.pop(rng.randrange(len(lent)))
                if rng.randrange(2):
                    call = LateCall()
                    memory.release(span, call)
                    late.append((span, call))
                else:
                    memory.release(span, LateCall(returned=True))
                    owner = [None if each is span else each for each in owner]
            case 3 if late:
                span, call = late.pop(rng.randrange(len(late)))
                call.returned = True
                owner = [None if each is span else each for each in owner]
            case _:
                pass
        assert memory.quarantined_bytes() == sum(span.size_bytes for span, _ in late)
    for _, call in late:
        call.returned = True
    for span in lent:
        memory.release(span)
    assert memory.reserve(pages_max * PAGE, 0.0) is not None


def test_where_only_quarantine_could_make_room_nobody_waits() -> None:
    clock = ManualClock()
    memory = BounceMemory.allocate(2 * PAGE, clock)
    span, call = memory.reserve(2 * PAGE, 0.0), LateCall()
    assert span is not None
    memory.release(span, call)
    assert memory.reserve(PAGE, 1e9) is None
    call.returned = True
    assert memory.reserve(2 * PAGE, 0.0) is not None


@pytest.mark.parametrize("has_returned", [True, False], ids=["free", "in quarantine"])
def test_a_span_that_is_given_back_goes_to_who_waits_and_nobody_waits_for_one_in_quarantine(has_returned: bool) -> None:
    memory = BounceMemory.allocate(PAGE)
    span = memory.reserve(PAGE, 0.0)
    assert span is not None
    with ThreadPoolExecutor(1) as taker:
        taken = taker.submit(memory.reserve, PAGE, 60.0)
        memory.release(span, LateCall(returned=has_returned))
        assert (taken.result(50.0) is not None) is has_returned


def test_memory_that_is_closed_is_given_to_nobody_and_outlives_what_is_in_use() -> None:
    memory = BounceMemory.allocate(2 * PAGE)
    span, call = memory.reserve(PAGE, 0.0), LateCall()
    assert span is not None
    memory.release(span, call)
    memory.close()
    memory.close()
    assert memory.reserve(PAGE, 60.0) is None
    span.view[:] = b"x" * PAGE  # a store that is late still writes
    assert memory.quarantined_bytes() == PAGE
    call.returned = True
    assert memory.quarantined_bytes() == 0


def test_more_memory_than_the_system_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="bounce buffers cannot be allocated"):
        BounceMemory.allocate(1 << 60)
