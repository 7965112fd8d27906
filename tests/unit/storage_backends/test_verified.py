"""The verifying wrapper: no flawed page is ever a hit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.store_calls import ScriptedStorage
from unified_cache.core.seal import HEADER_BYTES, Flaw
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.wrappers.layer import Method, VerifiedStorage
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, label, sealed_page


def flip(page: PageIO, offset: int) -> PageIO:
    page.buffers[0][offset] ^= 1
    return page


def foreign() -> PageIO:
    return PageIO(label(1), sealed_page(label(2)).buffers)


@pytest.mark.parametrize(
    ("make", "flaw"),
    [
        (lambda: flip(sealed_page(label(1)), 0), Flaw.HEADER),
        (lambda: flip(sealed_page(label(1)), HEADER_BYTES), Flaw.PAYLOAD),
        (lambda: flip(sealed_page(label(1)), PAGE_BYTES - 1), Flaw.PAYLOAD),
        (lambda: blank_page(label(1)), Flaw.HEADER),
        (foreign, Flaw.FOREIGN),
    ],
)
def test_a_flawed_page_is_a_miss_is_removed_and_counted(make: Callable[[], PageIO], flaw: Flaw) -> None:
    backend = MemoryStorage()
    storage = VerifiedStorage(backend)
    storage.put([sealed_page(label(0)), make(), sealed_page(label(3))], Level.CACHED)
    found = [blank_page(label(number)) for number in (0, 1, 3)]
    assert storage.get([*found, blank_page(label(7))]) == [Answer.HIT, Answer.FLAWED, Answer.HIT, Answer.MISS]
    assert storage.flaws_count == {flaw: 1}
    assert backend.exists([label(0), label(1), label(3)]) == [Answer.HIT, Answer.MISS, Answer.HIT]
    assert storage.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
    assert storage.get(found) == [Answer.HIT, Answer.HIT, Answer.HIT]
    assert storage.flaws_count == {flaw: 1}


def test_the_log_names_a_flawed_page_as_stores_list_it(caplog: pytest.LogCaptureFixture) -> None:
    storage = VerifiedStorage(MemoryStorage())
    storage.put([flip(sealed_page(label(1)), HEADER_BYTES)], Level.CACHED)
    storage.get([blank_page(label(1))])
    (record,) = caplog.records
    assert record.getMessage().endswith(f": {label(1).identity.hex()}/{label(1).key.hex()}.{label(1).pool}")


@pytest.mark.parametrize(("pages_count", "is_summed"), [(4, True), (3, False)])
def test_every_page_of_a_call_that_outgrows_the_caches_has_a_checksum_for_its_store(
    pages_count: int, is_summed: bool
) -> None:
    backend, checksums = ScriptedStorage(), set[int]()
    backend.claims["call_bytes"] = 64 << 20
    backend.before[Method.GET] = lambda: checksums.update(id(page.checksum) for page in backend.given if page.checksum)
    storage = VerifiedStorage(backend)
    pages = [sealed_page(label(number), 1 << 20) for number in range(pages_count)]
    storage.put(pages, Level.CACHED)
    assert storage.get([blank_page(page.label, 1 << 20) for page in pages]) == [Answer.HIT] * pages_count
    assert len(checksums) == pages_count * is_summed


@pytest.mark.threat("changed bytes in the store")
def test_a_bit_that_rots_on_disk_is_found(tmp_path: Path) -> None:
    storage = VerifiedStorage(FileStorage.open(tmp_path / "store"))
    storage.put([sealed_page(label(1))], Level.DURABLE)
    (path,) = (tmp_path / "store").rglob("*.kv")
    page = bytearray(path.read_bytes())
    page[500] ^= 4
    path.write_bytes(page)
    assert storage.get([blank_page(label(1))]) == [Answer.FLAWED]
    assert storage.flaws_count == {Flaw.PAYLOAD: 1}
    assert not path.exists()
    storage.close()
