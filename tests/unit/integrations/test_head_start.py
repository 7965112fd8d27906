"""Stock models that compute the head of a prompt while storage reads its tail: exact, and where both meet."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Semaphore

import pytest
import torch

from tests.support.exactness import (
    FAMILIES,
    SETTLE_S,
    CacheSizes,
    go_on,
    is_equal,
    kept_by,
    model_of,
    page_size_of,
    tokens_of,
    untouched,
)
from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.config import WritePolicy
from unified_cache.errors import StorageError
from unified_cache.integrations.transformers import PrefixCachedModel, Reused, Stage
from unified_cache.integrations.transformers import Sequence as Request
from unified_cache.integrations.transformers.head_start import MeetingPlace
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO
from unified_cache.tails import LandedTail

LLAMA = "tiny-llama"
PAGES = 8
ANSWER_S = 0.2
"""How long a call that was let through is waited for: there may be none, since a tail ends where it meets the head."""

every_family = pytest.mark.parametrize("family", FAMILIES)


class GatedStorage(MemoryStorage):
    """A store that answers as many calls of get as the test has let through; without a gate, all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Semaphore | None = None
        self.answered = Semaphore(0)
        self.gets_count = 0
        self.failing_get = -1
        """Number of the first call that fails, from 0; -1 for none."""

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        if self.gate is not None:
            assert self.gate.acquire(timeout=SETTLE_S), "the test lets nothing through"
        number, self.gets_count = self.gets_count, self.gets_count + 1
        if 0 <= self.failing_get <= number:
            raise StorageError("gone", retryable=False)
        answers = super().get(pages)
        self.answered.release()
        return answers

    def let_through(self, gate: Semaphore, calls: int) -> None:
        """Let calls through, and see them answered: who computes must not be done before they have begun."""
        gate.release(calls)
        for _ in range(calls):
            if not self.answered.acquire(timeout=ANSWER_S):
                break

    def close(self) -> None:
        """Stay open for the next cache."""


def tokens_for(family: str) -> tuple[int, ...]:
    return tokens_of(1, PAGES * page_size_of(family) + 5)


@contextmanager
def overlapping(family: str, store: GatedStorage, shape: CacheSizes = CacheSizes()) -> Iterator[PrefixCachedModel]:
    """Open an engine whose store has a prompt, and whose memory has nothing of it."""
    kept = kept_by(family)
    components = len(kept.layout.components)
    for sizes in (CacheSizes(), shape):
        config = CacheConfig(
            (sizes.device_pages,) * components, (sizes.host_pages,) * components, write=WritePolicy.THROUGH, guard=None
        )
        pages = kept.allocate(config.device_pages)
        with UnifiedCache.open(kept.layout, config, pages.pools, identity=Identity(family), storage=store) as cache:
            chunk_tokens = sizes.chunk_pages * kept.layout.page_size
            engine = PrefixCachedModel(model_of(family), cache, pages, chunk_tokens=chunk_tokens, overlaps=True)
            if sizes is shape:
                yield engine
            else:
                engine.prefill(tokens_for(family)).finish()
                cache.wait_all(SETTLE_S)


def served(
    engine: PrefixCachedModel, family: str, store: GatedStorage, calls_a_step: int
) -> tuple[Request, list[Stage]]:
    """Serve the prompt, letting some calls of the store through after each step; return the stages of its steps."""
    store.gate = gate = Semaphore(0)
    request = engine.start(tokens_for(family))
    stages: list[Stage] = []
    while (stage := request.step()) is not Stage.READY:
        stages.append(stage)
        if stage in (Stage.COMPUTE, Stage.FETCH):
            store.let_through(gate, calls_a_step)
    gate.release(10**6)
    return request, stages


def check_exact(engine: PrefixCachedModel, family: str, request: Request) -> Reused:
    """See that what follows the prompt is what the untouched model gives, bit by bit, and nothing is left."""
    tokens = tokens_for(family)
    assert is_equal(go_on(request), untouched(family, tokens))
    assert request.computed_tokens + request.reused.tokens == len(tokens)
    request.finish()
    engine.cache.wait_all(SETTLE_S)
    engine.cache.check()
    assert not any(lane.out for lane in engine.cache.stats().occupancy)
    return request.reused


@every_family
@pytest.mark.parametrize("calls_a_step", [1, 2, 3])
def test_a_prompt_whose_head_was_computed_meanwhile_is_exact(family: str, calls_a_step: int) -> None:
    store = GatedStorage()
    with overlapping(family, store) as engine:
        request, _ = served(engine, family, store, calls_a_step)
        check_exact(engine, family, request)


def test_head_and_tail_meet_in_between() -> None:
    store = GatedStorage()
    with overlapping(LLAMA, store) as engine:
        request, stages = served(engine, LLAMA, store, 2)
        assert Stage.LOAD in stages
        reused = check_exact(engine, LLAMA, request)
        page_size = page_size_of(LLAMA)
        assert page_size <= reused.storage_tokens <= (PAGES - 1) * page_size
        assert reused == Reused(storage_tokens=reused.storage_tokens)
        assert engine.cache.stats().loading.left_alone_tokens


@every_family
@pytest.mark.parametrize("failing_get", [0, 3])
def test_a_prompt_whose_tail_fails_is_computed(family: str, failing_get: int) -> None:
    store = GatedStorage()
    with overlapping(family, store) as engine:
        store.failing_get = failing_get
        request, _ = served(engine, family, store, 1)
        check_exact(engine, family, request)


def test_a_request_does_not_wait_for_a_store_that_hangs() -> None:
    store = GatedStorage()
    with overlapping(LLAMA, store) as engine:
        store.gate = Semaphore(0)
        request = engine.start(tokens_for(LLAMA))
        while request.step() is not Stage.READY:
            pass
        assert request.reused == Reused()
        store.gate.release(10**6)
        check_exact(engine, LLAMA, request)


@every_family
def test_a_prompt_without_room_for_its_head_is_exact(family: str) -> None:
    store = GatedStorage()
    with overlapping(family, store, CacheSizes(device_pages=3)) as engine:
        request, _ = served(engine, family, store, 1)
        check_exact(engine, family, request)


def test_a_request_that_is_aborted_gives_head_and_tail_back() -> None:
    steps_max = 20
    for steps in range(steps_max):
        store = GatedStorage()
        with overlapping(LLAMA, store) as engine:
            store.gate = Semaphore(0)
            request = engine.start(tokens_for(LLAMA))
            for _ in range(steps):
                if request.step() in (Stage.COMPUTE, Stage.FETCH):
                    store.gate.release()
            request.abort()
            store.gate.release(10**6)
            engine.cache.wait_all(SETTLE_S)
            assert not engine.cache._locks
            assert not any(lane.out for lane in engine.cache.stats().occupancy)
            engine.cache.check()


def test_chunks_of_many_pages_are_near_what_the_model_gives() -> None:
    store = GatedStorage()
    with overlapping(LLAMA, store, CacheSizes(chunk_pages=4)) as engine:
        request, _ = served(engine, LLAMA, store, 1)
        assert request.logits is not None
        torch.testing.assert_close(request.logits, untouched(LLAMA, tokens_for(LLAMA))[0], rtol=1e-4, atol=1e-4)
        request.finish()


# ---- where they meet -----------------------------------------------------------------------------------------


def met_after_s(pages: int, read_s: float, compute_s: float) -> float:
    """Return when head and tail have met, by a clock of its own, of a store and a model of steady speeds."""
    meeting = MeetingPlace()
    now_s, done = 0.0, 0
    while True:
        landed = LandedTail(max(0, pages - int(now_s / read_s + 1e-9)), pages)
        if landed.start <= done:
            return now_s
        meeting.note_landed(landed, now_s)
        count = meeting.pages_ahead(landed.start - done)
        if count:
            now_s += count * compute_s
            meeting.note_computed(count, count * compute_s)
            done += count
        else:
            now_s += read_s / 10


@pytest.mark.parametrize("pages", [4, 16, 100, 1000])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
def test_head_and_tail_meet_no_later_than_either_alone_by_more_than_two_pages(pages: int, share: float) -> None:
    compute_s, read_s = 1.0, 1.0 / share
    either_s = pages * min(read_s, compute_s)
    ideal_s = pages / (1 / read_s + 1 / compute_s)
    taken_s = met_after_s(pages, read_s, compute_s)
    assert taken_s <= either_s + compute_s
    assert taken_s <= 1.1 * ideal_s + 2 * min(read_s, compute_s) + compute_s


def test_a_store_that_stops_is_not_waited_for() -> None:
    meeting = MeetingPlace()
    meeting.note_computed(1, 1.0)
    meeting.note_landed(LandedTail(16, 16), 0.0)
    meeting.note_landed(LandedTail(2, 16), 1.4)
    assert meeting.pages_ahead(2) == 0, "two pages are read before one is computed"
    meeting.note_landed(LandedTail(2, 16), 14.0)
    assert meeting.pages_ahead(2) == 1


@pytest.mark.parametrize("jump_s", [0.0, -1e6])
def test_under_a_clock_that_stands_still_or_jumps_back_it_goes_on(jump_s: float) -> None:
    meeting = MeetingPlace()
    meeting.note_landed(LandedTail(16, 16), 0.0)
    meeting.note_computed(1, jump_s)
    meeting.note_landed(LandedTail(15, 16), jump_s)
    assert 1 <= meeting.pages_ahead(14) <= 14
