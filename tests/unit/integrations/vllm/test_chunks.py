from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore

import pytest

from tests.support.store_calls import ScriptedStorage
from tests.support.vllm_tier import FACTS, ROW, TIMEOUT_S, HostMemory, offload_key, tier_over
from tests.support.waiting import wait_until
from unified_cache.core.config import GuardConfig
from unified_cache.integrations.engine_store.calls import THREADS_MAX, WRITES_MAX
from unified_cache.integrations.engine_store.interface import REQUESTS_MIN
from unified_cache.integrations.vllm import chunks as module
from unified_cache.integrations.vllm.chunks import ChunkChange, ChunkTier, JobEnd
from unified_cache.integrations.vllm.metrics import FIGURES, TierFigures
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.protocol import Answer, Store
from unified_cache.storage_backends.wrappers import Method

ROWS = 16
KEYS = tuple(offload_key(number) for number in range(4))

Opened = Callable[..., ChunkTier]
"""Opens the tier of an engine: over a URL or an open store, with settings."""


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    host = HostMemory(ROWS)
    yield host
    host.close()


@pytest.fixture
def opened(memory: HostMemory) -> Iterator[Opened]:
    tiers: list[ChunkTier] = []

    def open_tier(
        store: str | Path | Store, host: HostMemory = memory, piece_bytes: int | None = None, **settings: object
    ) -> ChunkTier:
        url = f"file:{store}" if isinstance(store, Path) else store if isinstance(store, str) else "memory:"
        read = TierSettings.of({"url": url, "on_reset": "keep", **settings})
        if isinstance(store, Store):
            tiers.append(tier_over(store, host, read, piece_bytes))
        else:
            tiers.append(ChunkTier.open(read, FACTS, host.view, ROW))
        return tiers[-1]

    yield open_tier
    assert all(tier.close() for tier in tiers)


class Gate:
    """Holds up what passes it while it is shut."""

    def __init__(self) -> None:
        self.opens = Event()
        self._arrived = Semaphore(0)

    def __call__(self) -> None:
        self._arrived.release()
        assert self.opens.wait(TIMEOUT_S)

    def wait_for(self, count: int) -> None:
        """Wait until so many more have come to it."""
        for _ in range(count):
            assert self._arrived.acquire(timeout=TIMEOUT_S)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(gate: Gate) -> ScriptedStorage:
    """Return a store whose gets and puts wait at the gate."""
    store = ScriptedStorage()
    store.before = {Method.GET: gate, Method.PUT: gate}
    return store


def moved(store: ScriptedStorage) -> list[tuple[Method, int]]:
    return [(call.method, len(call.labels)) for call in store.noted if call.method in {Method.GET, Method.PUT}]


def found(tier: ChunkTier, request: str, keys: Sequence[bytes] = KEYS) -> list[Answer]:
    for key in keys:
        tier.look_up(key, request)
    tier.step_ended()
    assert tier.wait(TIMEOUT_S)
    return [tier.look_up(key, request) for key in keys]


def begin_store(tier: ChunkTier, memory: HostMemory, numbers: Sequence[int], job: int = 0, group: int = 0) -> None:
    keys = [offload_key(number, group) for number in numbers]
    for row, number in enumerate(numbers):
        memory.fill(row, number)
    tier.store(job, keys, range(len(keys)), lambda key: 16 * (keys.index(key) + 1))


def stored(tier: ChunkTier, memory: HostMemory, numbers: Sequence[int] = range(4), group: int = 0) -> JobEnd:
    begin_store(tier, memory, numbers, group=group)
    assert tier.wait(TIMEOUT_S)
    (end,) = tier.ended()
    return end


def loaded(tier: ChunkTier, keys: Sequence[bytes] = KEYS) -> JobEnd:
    tier.load(1, keys, range(8, 8 + len(keys)))
    assert tier.wait(TIMEOUT_S)
    (end,) = tier.ended()
    return end


def damage(root: Path, number: int) -> None:
    (path,) = [path for path in root.rglob(f"{offload_key(number)[:32].hex()}.g0") if path.is_file()]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_an_engine_finds_what_another_has_stored(memory: HostMemory, opened: Opened, tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert found(first, "a") == [Answer.MISS] * 4
    assert stored(first, memory).moved == KEYS
    second = opened(tmp_path)
    assert found(second, "b") == [Answer.HIT] * 4
    assert loaded(second).moved == KEYS
    assert [memory.row(8 + number) for number in range(4)] == [memory.payload(number) for number in range(4)]


def test_a_damaged_chunk_is_a_miss_while_the_request_lives_and_is_stored_again(
    memory: HostMemory, opened: Opened, tmp_path: Path
) -> None:
    tier = opened(tmp_path)
    stored(tier, memory)
    assert found(tier, "a") == [Answer.HIT] * 4
    damage(tmp_path, 1)
    end = loaded(tier)
    assert (end.moved, end.failed) == ((KEYS[0], *KEYS[2:]), (KEYS[1],))
    assert found(tier, "a") == [Answer.HIT, Answer.MISS, Answer.HIT, Answer.HIT]
    tier.request_ended("a")
    assert found(tier, "b")[1] is Answer.MISS
    tier.request_ended("b")
    stored(tier, memory)
    assert found(tier, "c") == [Answer.HIT] * 4


@pytest.mark.parametrize("end", ["stored again", "host memory has others", "reset", "paused"])
def test_chunks_that_the_store_was_away_for_are_wanted_again_until_it_has_them_or_nobody(
    end: str, memory: HostMemory, opened: Opened
) -> None:
    store = ScriptedStorage()
    tier = opened(store)
    assert not tier.wants_old_chunks
    store.failing = {Method.PUT}
    assert stored(tier, memory).failed == KEYS
    assert tier.wants_old_chunks
    if end == "paused":
        for _ in range(1, GuardConfig().breaker_failures_max):
            stored(tier, memory)
        assert tier.store_counts().breaker is BreakerState.OPEN
    store.failing = set()
    if end == "stored again":
        assert stored(tier, memory).moved == KEYS
    elif end == "host memory has others":
        for job in range(1, ROWS // 4 + 2):
            assert tier.wants_old_chunks
            stored(tier, memory, range(100 * job, 100 * job + 4))
    elif end == "reset":
        tier.drain()
    assert not tier.wants_old_chunks


@pytest.mark.parametrize(("on_reset", "expected"), [("keep", Answer.HIT), ("forget", Answer.MISS)])
def test_a_reset_keeps_or_forgets_what_is_stored(
    memory: HostMemory, opened: Opened, tmp_path: Path, on_reset: str, expected: Answer
) -> None:
    tier = opened(tmp_path, on_reset=on_reset)
    stored(tier, memory)
    assert found(tier, "a") == [Answer.HIT] * 4
    tier.drain()
    assert found(tier, "a") == [expected] * 4
    stored(tier, memory)
    tier.request_ended("a")
    assert found(tier, "b") == [Answer.HIT] * 4


def test_engines_that_were_reset_do_not_meet_in_one_generation(opened: Opened, tmp_path: Path) -> None:
    tiers = [opened(tmp_path, on_reset="forget") for _ in range(2)]
    for tier in tiers:
        tier.drain()
    assert tiers[0].names.identity != tiers[1].names.identity


def test_a_key_that_no_other_process_finds_is_a_miss_and_counted_and_nothing_is_stored_under_it(opened: Opened) -> None:
    store = ScriptedStorage()
    tier, key = opened(store), b"0123456789abcdef" + bytes(4)
    assert tier.look_up(key, "a") is Answer.MISS
    assert tier.counts.unstable_count == 1
    tier.store(0, [key], [0], {key: 16}.get)
    assert tier.wait(TIMEOUT_S)
    assert [end.failed for end in tier.ended()] == [(key,)]
    assert (store.offered, tier.wants_old_chunks) == ([], False)


def test_figures_are_what_was_added_since_the_reading_before(
    memory: HostMemory, opened: Opened, tmp_path: Path
) -> None:
    tier, figures = opened(tmp_path), TierFigures()

    def read() -> Mapping[tuple[str, ...], float]:
        readings = figures.readings(tier.counts, tier.store_counts())
        assert {reading.figure for reading in readings} <= set(FIGURES)
        return {(reading.figure.name, *reading.labels): reading.value for reading in readings}

    stored(tier, memory)
    first = read()
    assert first["vllm:unified_cache_store_chunks", "stored"] == 4
    assert first["vllm:unified_cache_store_bytes",] == 4 * ROW.payload_bytes
    assert first["vllm:unified_cache_registered",] == 1
    assert read() == {}
    for request in ("a", "b"):
        found(tier, request)
        tier.request_ended(request)
        assert read() == {("vllm:unified_cache_lookup_chunks", "hit"): 4}
    damage(tmp_path, 1)
    loaded(tier)
    assert read() == {
        ("vllm:unified_cache_load_chunks", "flawed"): 1,
        ("vllm:unified_cache_load_chunks", "hit"): 3,
        ("vllm:unified_cache_load_bytes",): 3 * ROW.payload_bytes,
        ("vllm:unified_cache_flawed_chunks", "payload"): 1,
    }


# ---- jobs ----------------------------------------------------------------------------------------------------------


def test_a_second_engine_over_packed_reads_in_its_figures_and_its_log_that_another_has_it(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = opened(f"packed:{tmp_path}"), opened(f"packed:{tmp_path}")
    for number in range(REQUESTS_MIN):
        assert found(second, str(number)) == [Answer.MISS] * 4
        second.request_ended(str(number))
    assert first.store_counts().is_registered
    figures = {
        (each.figure.name.removeprefix("vllm:unified_cache_"), *each.labels): each.value
        for each in TierFigures().readings(second.counts, second.store_counts())
    }
    assert (figures["registered",], figures["breaker_open",]) == (0, 1)
    assert figures["unavailable_chunks", "exists", "away"] == REQUESTS_MIN * 4
    assert any("nothing was restored" in line and "found another one who has it" in line for line in caplog.messages)


def test_chunks_are_stored_by_group_and_from_the_beginning_of_their_prompt(opened: Opened) -> None:
    store = ScriptedStorage()
    tier = opened(store)
    ends = {offload_key(number, group): 16 * number for group in (0, 1) for number in range(4)}
    keys = list(ends)[::-1]
    tier.store(0, keys, range(8), ends.get)
    assert tier.wait(TIMEOUT_S)
    assert [tier.names.offload_key(label) for label in store.offered] == list(ends)


def test_a_load_overtakes_stores_between_two_pieces(
    memory: HostMemory, opened: Opened, gated: ScriptedStorage, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.integrations.engine_store.calls.PART_BYTES_MIN", ROW.payload_bytes)
    tier = opened(gated, piece_bytes=ROW.payload_bytes, store_share=1.0)
    begin_store(tier, memory, range(6))
    gate.wait_for(WRITES_MAX)
    for number in range(1, THREADS_MAX):
        tier.load(number, [offload_key(9)], [8 + number])
    gate.wait_for(THREADS_MAX - WRITES_MAX)
    gate.opens.set()
    assert tier.wait(TIMEOUT_S)
    first = Counter(method for method, _ in moved(gated)[: THREADS_MAX + 1])
    assert first == {Method.GET: THREADS_MAX - 1, Method.PUT: WRITES_MAX}


def test_stores_beyond_their_share_of_the_rows_end_at_once_unless_no_other_waits(
    memory: HostMemory, opened: Opened, gated: ScriptedStorage, gate: Gate
) -> None:
    tier = opened(gated, store_share=8 / ROWS)
    begin_store(tier, memory, range(12))
    begin_store(tier, memory, [20], job=1)
    assert [(end.number, end.moved, end.failed) for end in tier.ended()] == [(1, (), (offload_key(20),))]
    dropped = TierFigures().readings(tier.counts, tier.store_counts())
    assert [(each.labels, each.value) for each in dropped if each.figure.name.endswith("store_chunks")] == [
        (("unavailable",), 1)
    ]
    gate.opens.set()
    assert tier.wait(TIMEOUT_S)
    assert [(end.number, end.failed) for end in tier.ended()] == [(0, ())]
    begin_store(tier, memory, range(4), job=2)
    begin_store(tier, memory, [20], job=3)
    assert tier.wait(TIMEOUT_S)
    assert not any(end.failed for end in tier.ended())


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_job_of_a_row_that_there_is_not_ends_with_nothing_moved(
    opened: Opened, gated: ScriptedStorage, row: int
) -> None:
    tier = opened(gated)
    tier.store(0, KEYS[:2], [0, row], lambda _: 16)
    tier.load(1, KEYS[:2], [0, row])
    assert [(end.number, end.failed) for end in tier.ended()] == [(0, KEYS[:2]), (1, KEYS[:2])]
    assert moved(gated) == []


def test_a_job_without_chunks_ends(memory: HostMemory, opened: Opened, tmp_path: Path) -> None:
    tier = opened(tmp_path)
    assert stored(tier, memory, []).answers == loaded(tier, []).answers == ()


@pytest.mark.parametrize("level", ["cached", "durable"])
def test_a_durable_store_asks_for_no_chunk_that_may_be_there_and_not_last(
    memory: HostMemory, opened: Opened, level: str
) -> None:
    store = ScriptedStorage()
    stored(opened(store, level=level), memory)
    assert (Method.EXISTS in store.calls) is (level == "cached")


def test_a_drain_that_takes_too_long_drops_what_has_not_begun(
    memory: HostMemory, opened: Opened, gated: ScriptedStorage, gate: Gate
) -> None:
    tier = opened(gated, close_timeout_s=0.01, store_share=1.0)
    for number in range(WRITES_MAX):
        begin_store(tier, memory, [number], job=number)
        gate.wait_for(1)
    begin_store(tier, memory, [9], job=9)
    ended: list[JobEnd] = []

    def has_ended() -> bool:
        ended.extend(tier.ended())
        return bool(ended)

    with ThreadPoolExecutor(1) as threads:
        draining = threads.submit(tier.drain)
        assert wait_until(has_ended, TIMEOUT_S)
        assert [(end.number, end.moved) for end in ended] == [(9, ())]
        gate.opens.set()
        draining.result(TIMEOUT_S)
    assert [end.failed for end in tier.ended()] == [()] * WRITES_MAX


def test_stores_under_way_end_before_the_tier_is_closed(memory: HostMemory, opened: Opened) -> None:
    store = ScriptedStorage(leaves_open=True)
    tier = opened(store)
    begin_store(tier, memory, range(4))
    assert tier.close()
    assert [end.moved for end in tier.ended()] == [KEYS]


def test_a_tier_whose_store_still_has_rows_says_so_when_it_is_closed(
    opened: Opened, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    store = ScriptedStorage(leaves_open=True)
    store.claims["bounded"] = True  # and so it is given the rows themselves
    store.before = {Method.GET: gate}
    tier = opened(store, close_timeout_s=0.01)
    tier.load(0, KEYS, range(4))
    gate.wait_for(1)
    assert not tier.close()
    gate.opens.set()
    assert tier.wait(TIMEOUT_S)


def test_the_store_is_told_what_is_in_use_by_so_many_calls_at_a_time(
    opened: Opened, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HINTS_MAX", 1)
    store = ScriptedStorage()
    store.before = {Method.TOUCH: gate}
    tier = opened(store)

    def is_told_again() -> bool:
        tier.touch([KEYS[2]])
        return len(store.touched) > 1

    tier.touch([KEYS[0]])
    tier.touch([KEYS[1]])
    gate.opens.set()
    assert wait_until(is_told_again, TIMEOUT_S)
    assert {label.key for label in store.touched} == {KEYS[0][:32], KEYS[2][:32]}


# ---- changes of the store --------------------------------------------------------------------------------------------


def watched(opened: Opened, store: str | Path, **settings: object) -> ChunkTier:
    tier = opened(store, **settings)
    tier.watch()
    assert tier.changes() == []
    return tier


@pytest.mark.parametrize("scheme", ["file", "packed"])
def test_what_a_store_evicts_is_known_by_the_engine_s_own_keys(
    scheme: str, memory: HostMemory, opened: Opened, tmp_path: Path
) -> None:
    tier = watched(opened, f"{scheme}:{tmp_path}", bytes_max=256 << 10)
    assert tier.reports_removals
    offered: list[bytes] = []
    there: set[bytes] = set()
    for job in range(20):
        keys = stored(tier, memory, range(16 * job, 16 * job + 16), group=job % 2).keys
        offered += keys
        for change in tier.changes():
            assert set(change.keys) <= (there if change.is_removal else set(keys))
            there = there - set(change.keys) if change.is_removal else there | set(change.keys)
    assert 0 < len(there) < len(offered)
    answers = found(tier, "a", offered)
    assert {key for key, answer in zip(offered, answers, strict=True) if answer is Answer.HIT} == there


def test_a_chunk_that_is_found_damaged_is_reported_as_gone_and_not_by_a_job_from_before(
    memory: HostMemory, opened: Opened, tmp_path: Path
) -> None:
    tier = watched(opened, tmp_path)
    stored(tier, memory, range(2))
    assert tier.changes() == [ChunkChange(KEYS[:2])]
    begin_store(tier, memory, range(4))
    assert tier.wait(TIMEOUT_S)
    damage(tmp_path, 1)
    tier.load(1, KEYS[:2], range(8, 10))
    assert tier.wait(TIMEOUT_S)
    assert tier.changes() == [ChunkChange(KEYS[1:2], is_removal=True)]
    tier.ended()
    assert tier.changes() == [ChunkChange((KEYS[0], *KEYS[2:]))]
    stored(tier, memory, [1])
    assert tier.changes() == [ChunkChange(KEYS[1:2])]


def test_what_was_stored_before_a_reset_that_forgets_is_not_reported_after_it(
    memory: HostMemory, opened: Opened, tmp_path: Path
) -> None:
    tier = watched(opened, tmp_path, on_reset="forget")
    stored(tier, memory, range(2))
    begin_store(tier, memory, range(4))
    tier.drain()
    tier.ended()
    assert tier.changes() == []
    stored(tier, memory)
    assert tier.changes() == [ChunkChange(KEYS)]


def test_changes_that_nobody_takes_are_bounded_and_without_a_watch_there_are_none(
    memory: HostMemory, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHANGES_MAX", 2)
    tier = opened(tmp_path)
    stored(tier, memory)
    assert tier.changes() == []
    tier.watch()
    for number in range(4):
        stored(tier, memory, [number])
    assert tier.changes() == [ChunkChange(KEYS[2:3]), ChunkChange(KEYS[3:])]
