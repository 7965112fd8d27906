"""Stores in a directory that an earlier version wrote are read, verified and extended by this one."""

import re
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from tests.sources import ROOT
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
from unified_cache.storage_backends.offline.listing import count_objects
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StoredObject
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

ARCHIVES = sorted((Path(__file__).parents[1] / "fixtures").glob("stores_*.tar.gz"))

ADDED = {pool: range(12, 20) for pool in PAYLOAD_BYTES}


def blanks_for(pages: Sequence[PageIO]) -> list[PageIO]:
    return [page._replace(buffers=(memoryview(bytearray(page.buffers[0].nbytes)),)) for page in pages]


def check_holds(kind: StoreKind, storage: DirectoryStorage, pages: Sequence[PageIO]) -> None:
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
    assert storage.bytes_used == sum(kind.taken_bytes(page.buffers[0].nbytes) for page in pages)


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def root(tmp_path: Path, kind: StoreKind, request: pytest.FixtureRequest) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(
            tmp_path, filter="tar", members=[each for each in archive if each.name.startswith(kind.value)]
        )
    return tmp_path / kind.value


def test_every_page_reads_as_it_was_written_and_removed_ones_are_absent(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root)) as storage:
        check_holds(kind, storage, pages_of(STORED))
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
        check_holds(kind, storage, pages_of(STORED) + pages_of(ADDED) + pages_of(REMOVED))


def test_times_of_use_are_known_and_a_cap_evicts_by_them(kind: StoreKind, root: Path) -> None:
    # The last page of the first batch was used first; the first page was read at the very end.
    oldest, newest = (expected_page(WINDOWED, pool, number) for pool, number in (("kv_index", 4), ("kv", 0)))
    with closing(kind.open(root)) as storage:
        used = count_objects(storage, WINDOWED).used
        assert used is not None
        assert 1_000_000 * 10**9 <= used.oldest_ns < used.newest_ns <= 1_000_100 * 10**9
        bytes_used = storage.bytes_used
    with closing(kind.open(root, bytes_max=bytes_used - 1)) as storage:
        assert storage.counts.evicted_count == 1
        assert storage.exists([oldest.label, newest.label]) == [Answer.MISS, Answer.HIT]


# Stores that stand frozen hold, byte by byte, what docs/format.md says; the tables are read from the page itself


DOCUMENT = ROOT / "docs" / "format.md"


def fields_under(heading: str) -> dict[str, slice]:
    """Read the table of offsets below a heading of the document: the bytes of each field."""
    (section,) = re.findall(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([a-z ]+) \|", section, re.MULTILINE)
    return {field: slice(int(start), int(start) + int(size)) for start, size, field in rows}


def number(text: bytes) -> int:
    return int.from_bytes(text, "little")


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def stores(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_the_tables_leave_no_byte_out() -> None:
    for heading, end in (("Page", 128), ("`packed:`", 48)):
        stops = [0, *(field.stop for field in fields_under(heading).values())]
        assert [field.start for field in fields_under(heading).values()] == stops[:-1]
        assert stops[-1] == end


def test_a_file_of_a_page_is_the_seal_of_the_document_and_the_payload(stores: Path) -> None:
    fields = fields_under("Page")
    paths = [path for path in (stores / "file").rglob("*") if len(path.stem) == 64 and path.is_file()]
    assert len(paths) == sum(map(len, STORED.values()))
    for path in paths:
        page = path.read_bytes()
        found = {name: page[field] for name, field in fields.items()}
        assert found["magic"] == b"UKVP"
        assert number(found["version"]) == 1
        assert number(found["header bytes"]) == 128
        assert number(found["payload bytes"]) == len(page) - 128
        assert found["identity"].hex() == path.parents[1].name
        assert found["key"].hex() == path.stem
        assert path.parent.name == path.stem[0]
        assert found["pool"].rstrip(b"\0").decode() == path.suffix[1:]
        assert number(found["payload checksum"]) == xxh3_64_intdigest(page[128:])
        assert number(found["header checksum"]) == xxh3_64_intdigest(page[:120])


def test_a_packed_file_is_the_table_of_the_document_and_a_page_in_each_slot_that_it_enters(stores: Path) -> None:
    fields = fields_under("`packed:`")
    for (identity, pool), payload_bytes in PAYLOAD_BYTES.items():
        page_bytes = 128 + payload_bytes
        (path,) = (stores / "packed" / identity.hex()).glob(f"{pool}.*.pack")
        assert path.name == f"{pool}.{page_bytes}.1.pack"
        grain = 4096 if page_bytes >= 32 << 10 else 128
        slot_bytes = -(-page_bytes // grain) * grain
        slots_count = min((4 << 30) // slot_bytes, 65_536)
        table_bytes = -(-slots_count * 48 // 4096) * 4096
        content = path.read_bytes()
        expected = {
            page.label.key: bytes(page.buffers[0]) for page in pages_of({(identity, pool): STORED[identity, pool]})
        }
        for slot in range((len(content) - table_bytes) // slot_bytes + 1):
            entry = content[slot * 48 : (slot + 1) * 48]
            if not any(entry):
                continue
            key = entry[fields["key"]]
            assert number(entry[fields["check"]]) == xxh3_64_intdigest(key, seed=slot)
            assert 1_000_000 * 10**9 <= number(entry[fields["used"]]) < 1_000_100 * 10**9
            start = table_bytes + slot * slot_bytes
            assert content[start : start + page_bytes] == expected.pop(key)
        assert not expected


def test_a_marker_says_the_versions_of_the_document(stores: Path) -> None:
    text = DOCUMENT.read_text()
    assert (stores / "file" / "store.json").read_text().strip() in text
    for kind, version in (("file", 2), ("packed", 1)):
        marker = (stores / kind / "store.json").read_text()
        assert f'"unified-cache {kind} store", "format_version": {version}' in marker
        assert f"`{kind} store` {version}" in text
