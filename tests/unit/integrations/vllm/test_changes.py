from pathlib import Path
from typing import Literal

import pytest

from tests.support.vllm_tier import FACTS, ROW, TIMEOUT_S, HostMemory, offload_key
from unified_cache.integrations.vllm.changes import CHANGES_MAX, ChunkChanges, ChunksRemoved, ChunksStored
from unified_cache.integrations.vllm.chunks import ChunkTier
from unified_cache.integrations.vllm.settings import TierSettings

KEYS = tuple(offload_key(number) for number in range(4))


def test_chunks_are_reported_when_their_job_ends_and_when_they_go() -> None:
    changes = ChunkChanges()
    changes.begin(1)
    assert changes.take() == []
    changes.end(1, KEYS)
    changes.remove(KEYS[1:2])
    assert changes.take() == [ChunksStored(KEYS), ChunksRemoved(KEYS[1:2])]
    assert changes.take() == []


def test_a_chunk_that_went_before_its_job_ended_is_not_reported_as_stored() -> None:
    changes = ChunkChanges()
    changes.begin(1)
    changes.remove(KEYS[:1])
    changes.begin(2)
    changes.end(1, KEYS[:2])
    changes.end(2, KEYS[:1])
    # The second job began after the chunk had gone: it has stored the chunk anew.
    assert changes.take() == [ChunksRemoved(KEYS[:1]), ChunksStored(KEYS[1:2]), ChunksStored(KEYS[:1])]


def test_what_went_is_remembered_for_jobs_under_way_only() -> None:
    changes = ChunkChanges()
    changes.remove(KEYS[:1])
    changes.begin(1)
    for number in range(2, 1000):
        changes.begin(number)
        changes.remove((offload_key(number),))
        changes.end(number - 1, ())
    assert len(changes._gone) <= 2
    changes.end(999, ())
    assert not changes._gone
    assert len(changes.take()) == 999


def test_changes_that_nobody_takes_are_bounded() -> None:
    changes = ChunkChanges()
    for number in range(CHANGES_MAX + 5):
        changes.remove((offload_key(number),))
    assert len(changes.take()) == CHANGES_MAX


def test_a_job_of_before_a_reset_tells_nothing() -> None:
    changes = ChunkChanges()
    changes.begin(1)
    changes.remove(KEYS[:1])
    changes.forget()
    changes.end(1, KEYS)
    assert changes.take() == []


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(64)


def watched(
    memory: HostMemory, url: str, on_reset: Literal["forget", "keep"] = "keep", bytes_max: int | None = None
) -> ChunkTier:
    tier = ChunkTier.open(TierSettings(url=url, on_reset=on_reset, bytes_max=bytes_max), FACTS, memory.view, ROW)
    tier.watch()
    assert tier.changes() == []
    return tier


def store(tier: ChunkTier, memory: HostMemory, job: int, numbers: range, group: int = 0) -> tuple[bytes, ...]:
    keys = [offload_key(number, group) for number in numbers]
    for row, number in enumerate(numbers):
        memory.fill(row, number)
    tier.store(job, keys, range(len(keys)), lambda key: 16 * (keys.index(key) + 1))
    assert tier.wait(TIMEOUT_S)
    return tuple(keys)


@pytest.mark.parametrize("scheme", ["file", "packed"])
def test_what_a_store_evicts_is_known_by_the_engine_s_own_keys(scheme: str, memory: HostMemory, tmp_path: Path) -> None:
    tier = watched(memory, f"{scheme}:{tmp_path}", bytes_max=256 << 10)
    assert tier.reports_removals
    there: set[bytes] = set()
    for job in range(20):
        group = job % 2
        stored = store(tier, memory, job, range(16 * job, 16 * job + 16), group)
        tier.ended()
        for change in tier.changes():
            match change:
                case ChunksStored(keys):
                    assert set(keys) <= set(stored)
                    there |= set(keys)
                case ChunksRemoved(keys):
                    assert set(keys) <= there
                    there -= set(keys)
    assert 0 < len(there) < 20 * 16
    for key in there:
        tier.look_up(key, "a")
    gone = [key for job in range(20) for key in (offload_key(16 * job, job % 2),) if key not in there]
    assert gone
    for key in gone:
        tier.look_up(key, "a")
    tier.step_ended()
    assert tier.wait(TIMEOUT_S)
    assert {key for key in there if tier.look_up(key, "a").value == "hit"} == there
    assert not [key for key in gone if tier.look_up(key, "a").value == "hit"]
    assert tier.close()
    memory.close()


def test_what_goes_of_another_engine_is_not_reported(memory: HostMemory, tmp_path: Path) -> None:
    tier = watched(memory, f"file:{tmp_path}", "forget")
    store(tier, memory, 1, range(4))
    tier.ended()
    assert tier.changes() == [ChunksStored(KEYS)]
    stored = [path for path in tmp_path.rglob("*.g0") if path.is_file()]
    assert len(stored) == 4
    tier.drain()
    # Pages of the generation before go, which this engine does not look for any more.
    for path in stored:
        path.write_bytes(b"damaged")
    assert tier.changes() == []
    assert tier.close()
    memory.close()


def test_what_was_stored_before_a_reset_that_forgets_is_not_reported_after_it(
    memory: HostMemory, tmp_path: Path
) -> None:
    tier = watched(memory, f"file:{tmp_path}", "forget")
    store(tier, memory, 1, range(4))
    tier.drain()
    tier.ended()
    assert tier.changes() == []
    store(tier, memory, 2, range(4))
    tier.ended()
    assert tier.changes() == [ChunksStored(KEYS)]
    assert tier.close()
    memory.close()


def test_a_damaged_chunk_that_was_found_out_is_reported_as_gone(memory: HostMemory, tmp_path: Path) -> None:
    tier = watched(memory, f"file:{tmp_path}")
    store(tier, memory, 1, range(4))
    tier.ended()
    assert tier.changes() == [ChunksStored(KEYS)]
    (damaged,) = [path for path in tmp_path.rglob(f"{KEYS[1][:32].hex()}.g0") if path.is_file()]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    tier.load(2, KEYS, range(8, 12))
    assert tier.wait(TIMEOUT_S)
    tier.ended()
    assert tier.changes() == [ChunksRemoved(KEYS[1:2])]
    assert tier.close()
    memory.close()


def test_who_does_not_watch_is_told_nothing(memory: HostMemory, tmp_path: Path) -> None:
    tier = ChunkTier.open(TierSettings(url=f"file:{tmp_path}"), FACTS, memory.view, ROW)
    store(tier, memory, 1, range(4))
    tier.ended()
    assert tier.changes() == []
    assert tier.close()
    memory.close()
