"""Stores in a directory that an earlier version wrote are read, verified and extended by this one."""

import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.store_kinds import DirectoryStorage, StoreKind
from tests.unit.storage_backends.fixtures.write_stores import (
    HYBRID,
    PAYLOAD_BYTES,
    REMOVED,
    STORED,
    WINDOWED,
    expected_page,
    pages_of,
)
from unified_cache.storage_backends.manifest import described_by
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StoredObject
from unified_cache.storage_backends.verified import VerifiedStorage

FIXTURES = Path(__file__).parents[1] / "fixtures"
ARCHIVES = ("stores_v1.tar.gz", "stores_0.1.0.tar.gz")
"""By edition, the oldest first."""

ADDED = {pool: range(12, 20) for pool in PAYLOAD_BYTES}


def blanks_for(pages: Sequence[PageIO]) -> list[PageIO]:
    return [page._replace(buffers=(memoryview(bytearray(page.buffers[0].nbytes)),)) for page in pages]


def check_holds(storage: DirectoryStorage, pages: Sequence[PageIO]) -> None:
    """Check that a store holds these pages, byte by byte, and lists them and no others."""
    verified = VerifiedStorage(storage)
    assert all(storage.exists([page.label for page in pages]))
    for batch in (pages[start : start + 7] for start in range(0, len(pages), 7)):
        read = blanks_for(batch)
        assert all(verified.get(read))
        assert [bytes(page.buffers[0]) for page in read] == [bytes(page.buffers[0]) for page in batch]
    for identity in (WINDOWED, HYBRID):
        listed = [StoredObject(page.label, page.buffers[0].nbytes) for page in pages if page.label.identity == identity]
        assert sorted(storage.scan(identity).objects) == sorted(listed)
    assert storage.bytes_used == sum(page.buffers[0].nbytes for page in pages)


@pytest.fixture(params=StoreKind, ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> StoreKind:
    return StoreKind(request.param)


@pytest.fixture(params=ARCHIVES)
def root(tmp_path: Path, kind: StoreKind, request: pytest.FixtureRequest) -> Path:
    with tarfile.open(FIXTURES / request.param) as archive:
        archive.extractall(
            tmp_path, filter="tar", members=[each for each in archive if each.name.startswith(kind.value)]
        )
    return tmp_path / kind.value


def test_every_page_reads_as_it_was_written_and_removed_ones_are_absent(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root)) as storage:
        check_holds(storage, pages_of(STORED))
        removed = pages_of(REMOVED)
        assert not any(storage.exists([page.label for page in removed]))
        assert not any(storage.get(blanks_for(removed)))


def test_manifests_describe_the_identities_under_the_digests_of_today(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root)) as storage:
        manifests = storage.manifests()
        assert manifests.keys() == {WINDOWED, HYBRID}
        for digest, model, pools in (
            (WINDOWED, "fixture/windowed", ["kv", "kv_index", "swa"]),
            (HYBRID, "fixture/hybrid", ["kv", "state"]),
        ):
            manifest = manifests[digest]
            assert manifest is not None
            described = described_by(manifest)
            assert described.identity.model == model
            assert described.identity.digest(described.layout) == digest
            assert [(pool.name, pool.page_bytes) for pool in described.layout.pools] == [
                (pool, PAYLOAD_BYTES[digest, pool]) for pool in pools
            ]
            storage.register(manifest, {})


def test_pages_that_are_added_stand_beside_the_former_ones_after_a_restart(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root)) as storage:
        assert all(storage.put(pages_of(STORED), Level.DURABLE))
        assert all(storage.put(pages_of(ADDED), Level.DURABLE))
        assert all(storage.put(pages_of(REMOVED), Level.CACHED))
    with closing(kind.open(root)) as storage:
        check_holds(storage, pages_of(STORED) + pages_of(ADDED) + pages_of(REMOVED))


def test_times_of_use_are_known_and_a_cap_evicts_by_them(kind: StoreKind, root: Path) -> None:
    # The last page of the first batch was used first; the first page was read at the very end.
    oldest, newest = (expected_page(WINDOWED, pool, number) for pool, number in (("kv_index", 4), ("kv", 0)))
    with closing(kind.open(root)) as storage:
        used = storage.used_between(WINDOWED)
        assert used is not None
        assert 1_000_000 * 10**9 <= used.oldest_ns < used.newest_ns <= 1_000_100 * 10**9
        bytes_used = storage.bytes_used
    with closing(kind.open(root, bytes_max=bytes_used - 1)) as storage:
        assert storage.counts.evicted_count == 1
        assert storage.exists([oldest.label, newest.label]) == [Answer.MISS, Answer.HIT]
