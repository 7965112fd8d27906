from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.engines.stores import FaultSwitch, faulty_url
from tests.support.store_calls import StorageFault
from tests.support.vllm_recording import RecordedEngine, recordings
from tests.support.vllm_tier import FACTS, ROW, TIMEOUT_S, HostMemory, offload_key
from unified_cache.core.config import GuardConfig
from unified_cache.integrations.vllm.chunks import ChunkTier
from unified_cache.integrations.vllm.metrics import FIGURES, Reading, TierFigures
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.protocol import Answer

ROWS = 16
KEYS = [offload_key(number) for number in range(4)]
ENDS = {key: (number + 1) * 16 for number, key in enumerate(KEYS)}


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    host = HostMemory(ROWS)
    yield host
    host.close()


def opened(memory: HostMemory, url: str, on_reset: Literal["forget", "keep"] = "keep") -> ChunkTier:
    return ChunkTier.open(TierSettings(url=url, on_reset=on_reset), FACTS, memory.view, ROW)


def found(tier: ChunkTier, request: str) -> list[Answer]:
    for key in KEYS:
        tier.look_up(key, request)
    tier.step_ended()
    assert tier.wait(TIMEOUT_S)
    return [tier.look_up(key, request) for key in KEYS]


def store_all(tier: ChunkTier, memory: HostMemory) -> None:
    for number in range(len(KEYS)):
        memory.fill(number, number)
    tier.store(0, KEYS, range(len(KEYS)), ENDS.get)
    assert tier.wait(TIMEOUT_S)
    (end,) = tier.ended()
    assert not end.failed


@pytest.mark.parametrize("kind", ["file", "bucket"])
def test_an_engine_finds_what_another_has_stored(
    memory: HostMemory, store_url: Callable[[str], str], kind: str
) -> None:
    url = store_url(kind)
    first = opened(memory, url)
    assert found(first, "a") == [Answer.MISS] * 4
    store_all(first, memory)
    assert first.close()
    second = opened(memory, url)
    assert found(second, "b") == [Answer.HIT] * 4
    second.load(1, KEYS, range(8, 12))
    assert second.wait(TIMEOUT_S)
    assert [end.failed for end in second.ended()] == [()]
    assert [memory.row(8 + number) for number in range(4)] == [memory.payload(number) for number in range(4)]
    assert second.close()


def test_a_damaged_chunk_is_a_miss_while_the_request_lives_and_is_stored_again(
    memory: HostMemory, tmp_path: Path
) -> None:
    tier = opened(memory, f"file:{tmp_path}")
    store_all(tier, memory)
    assert found(tier, "a") == [Answer.HIT] * 4
    (damaged,) = [path for path in tmp_path.rglob(f"{KEYS[1][:32].hex()}.g0") if path.is_file()]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    tier.load(1, KEYS, range(8, 12))
    assert tier.wait(TIMEOUT_S)
    (end,) = tier.ended()
    assert end.failed == (KEYS[1],)
    assert found(tier, "a") == [Answer.HIT, Answer.MISS, Answer.HIT, Answer.HIT]
    tier.request_ended("a")
    assert found(tier, "b")[1] is Answer.MISS
    tier.request_ended("b")
    store_all(tier, memory)
    assert found(tier, "c") == [Answer.HIT] * 4
    assert tier.counts().loaded == {Answer.HIT: 3, Answer.FLAWED: 1}
    assert tier.close()


def test_chunks_that_the_store_was_away_for_are_wanted_again_when_it_is_back(
    memory: HostMemory, tmp_path: Path
) -> None:
    switch, tier = FaultSwitch(tmp_path), opened(memory, faulty_url(tmp_path))
    switch.set(put=StorageFault.FAIL)
    assert not tier.wants_old_chunks
    tier.store(0, KEYS, range(4), ENDS.get)
    assert tier.wait(TIMEOUT_S)
    assert [end.failed for end in tier.ended()] == [tuple(KEYS)]
    assert tier.wants_old_chunks
    switch.set()
    store_all(tier, memory)
    assert not tier.wants_old_chunks
    assert found(tier, "a") == [Answer.HIT] * 4
    assert tier.close()


def test_chunks_that_host_memory_has_no_more_are_wanted_no_more(memory: HostMemory, tmp_path: Path) -> None:
    switch, tier = FaultSwitch(tmp_path), opened(memory, faulty_url(tmp_path))
    switch.set(put=StorageFault.FAIL)
    tier.store(0, KEYS, range(4), ENDS.get)
    assert tier.wait(TIMEOUT_S)
    tier.ended()
    switch.set()
    for job in range(1, ROWS // 4 + 2):
        assert tier.wants_old_chunks
        others = [offload_key(100 * job + number) for number in range(4)]
        tier.store(job, others, range(4), dict(zip(others, ENDS.values(), strict=True)).get)
        assert tier.wait(TIMEOUT_S)
        tier.ended()
    assert not tier.wants_old_chunks
    assert tier.close()


def test_nothing_is_wanted_of_a_store_that_is_left_alone_or_after_a_reset(
    memory: HostMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, switch = faulty_url(tmp_path), FaultSwitch(tmp_path)
    tier = opened(memory, url)
    switch.set(put=StorageFault.FAIL)
    for job in range(GuardConfig().breaker_failures_max):
        tier.store(job, KEYS, range(4), ENDS.get)
        assert tier.wait(TIMEOUT_S)
    tier.ended()
    assert tier.store_counts().breaker is BreakerState.OPEN
    assert f"a breaker opens: {url} is paused for" in caplog.text
    assert caplog.text.rstrip().endswith(f"failures: put {GuardConfig().breaker_failures_max}")
    assert not tier.wants_old_chunks
    tier.drain()
    assert not tier.wants_old_chunks
    assert tier.close()


@pytest.mark.parametrize(("on_reset", "expected"), [("keep", Answer.HIT), ("forget", Answer.MISS)])
def test_a_reset_keeps_or_forgets_what_is_stored(
    memory: HostMemory, tmp_path: Path, on_reset: Literal["forget", "keep"], expected: Answer
) -> None:
    tier = opened(memory, f"file:{tmp_path}", on_reset)
    store_all(tier, memory)
    assert found(tier, "a") == [Answer.HIT] * 4
    tier.drain()
    assert found(tier, "a") == [expected] * 4
    store_all(tier, memory)
    tier.request_ended("a")
    assert found(tier, "b") == [Answer.HIT] * 4
    assert tier.close()


def test_engines_that_were_reset_do_not_meet_in_one_generation(memory: HostMemory, tmp_path: Path) -> None:
    other = HostMemory(ROWS)
    tiers = [opened(host, f"file:{tmp_path}", "forget") for host in (memory, other)]
    for tier in tiers:
        tier.drain()
    assert tiers[0].names.identity != tiers[1].names.identity
    assert all(tier.close() for tier in tiers)
    other.close()


def test_a_job_that_is_drained_was_stored_first(memory: HostMemory, tmp_path: Path) -> None:
    tier = opened(memory, f"file:{tmp_path}")
    tier.store(0, KEYS, range(4), ENDS.get)
    tier.drain()
    (end,) = tier.ended()
    assert end.moved == tuple(KEYS)
    assert tier.close()


def test_a_key_that_no_other_process_finds_is_a_miss_and_counted(memory: HostMemory, tmp_path: Path) -> None:
    tier = opened(memory, f"file:{tmp_path}")
    assert tier.look_up(b"0123456789abcdef" + bytes(4), "a") is Answer.MISS
    assert tier.counts().unstable_count == 1
    assert tier.close()


def test_figures_are_what_was_added_since_the_reading_before(memory: HostMemory, tmp_path: Path) -> None:
    tier, figures = opened(memory, f"file:{tmp_path}"), TierFigures()
    store_all(tier, memory)
    first = {(reading.figure.name, *reading.labels): reading.value for reading in read(tier, figures)}
    assert first["vllm:unified_cache_store_chunks", "stored"] == 4
    assert first["vllm:unified_cache_store_bytes",] == 4 * ROW.payload_bytes
    assert first["vllm:unified_cache_registered",] == 1
    assert read(tier, figures) == []
    found(tier, "a")
    (reading,) = read(tier, figures)
    assert (reading.figure.name, reading.labels, reading.value) == ("vllm:unified_cache_lookup_chunks", ("hit",), 4)
    assert {reading.figure for reading in read(tier, figures)} <= set(FIGURES)
    assert tier.close()


def read(tier: ChunkTier, figures: TierFigures) -> list[Reading]:
    return figures.readings(tier.counts(), tier.store_counts())


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.stem)
@pytest.mark.parametrize("scheme", ["file", "packed"])
def test_the_calls_of_a_real_engine_are_answered_as_they_were(path: Path, scheme: str, tmp_path: Path) -> None:
    lines = iter([line.split() for line in path.read_text().splitlines()])
    engine = RecordedEngine.open(lines, TierSettings(url=f"{scheme}:{tmp_path}", on_reset="keep"))
    engine.play(lines)
    assert engine.hits_count > 0
    assert engine.loaded_count > 0
    engine.close()
