"""Pages whose checksum is taken while they are read, piece by piece: verified as strictly as those read whole."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.budget import PHASES, examples
from tests.support.files import DiskFault, FaultyDisk
from tests.support.store_kinds import StoreKind
from tests.support.wrappers import retrying
from unified_cache.core.seal import HEADER_BYTES, Flaw, PageChecksum, verify_buffers
from unified_cache.storage_backends.directory import disk as disk_module
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.wrappers import layer
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

PIECE_BYTES = 1000
PAGE_BYTES = 4321


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in small pieces what is small, which takes no time."""
    monkeypatch.setattr(layer, "SUMMED_BYTES_MIN", PAGE_BYTES)
    monkeypatch.setattr(disk_module, "PIECE_BYTES", PIECE_BYTES)


def sealed(number: int, cuts: Sequence[int] = ()) -> PageIO:
    return sealed_page(label(number), PAGE_BYTES, cuts)


def blank(number: int, cuts: Sequence[int] = ()) -> PageIO:
    return blank_page(label(number), PAGE_BYTES, cuts)


@pytest.mark.parametrize("kept_bytes", [0, 1, HEADER_BYTES, PIECE_BYTES, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_an_object_that_ends_within_any_piece_or_after_the_last_is_flawed(root: Path, kept_bytes: int) -> None:
    with closing(VerifiedStorage(StoreKind.FILE.open(root))) as storage:
        storage.put([sealed(1)], Level.CACHED)
        (path,) = root.rglob("*.kv")
        with path.open("r+b") as file:
            file.truncate(kept_bytes)
        assert storage.get([blank(1)]) == [Answer.FLAWED]
        assert storage.exists([label(1)]) == [Answer.MISS]


def test_a_page_that_is_read_again_after_a_fault_is_added_again(kind: StoreKind, root: Path) -> None:
    disk = FaultyDisk(DiskFault.EMFILE, only="preadv")
    again = retrying(kind.open(root, disk=disk), 2)
    with closing(VerifiedStorage(again)) as storage:
        storage.put([sealed(1)], Level.CACHED)
        for number in range(PAGE_BYTES // PIECE_BYTES):
            disk.failing = range(len(disk.calls) + number, len(disk.calls) + number + 1)
            found = blank(1)
            assert storage.get([found]) == [Answer.HIT]
            assert bytes_of(found) == bytes_of(sealed(1))
        assert again.retries_count == PAGE_BYTES // PIECE_BYTES
        assert storage.flaws_count == {}


def test_a_checksum_that_the_caller_made_is_not_believed() -> None:
    with closing(VerifiedStorage(MemoryStorage())) as storage:
        for page_bytes in (1000, PAGE_BYTES):
            page = sealed_page(label(1), page_bytes)
            checksum = PageChecksum()
            checksum.add(0, page.buffers)
            page.buffers[0][500] ^= 1
            storage.put([page], Level.CACHED)
            found = blank_page(label(1), page_bytes)._replace(checksum=checksum)
            assert storage.get([found]) == [Answer.FLAWED]


CUTS = st.lists(st.integers(0, PAGE_BYTES - 1), max_size=12).map(sorted)


@pytest.mark.parametrize("small", StoreKind, ids=lambda small: small.value)
@settings(max_examples=examples(60, 2_000), deadline=None, phases=PHASES)
@given(put_cuts=CUTS, get_cuts=CUTS, flipped=st.none() | st.integers(0, PAGE_BYTES - 1), falls_short=st.booleans())
def test_pages_in_any_cuts_are_read_and_verified_as_if_they_were_joined(
    small: StoreKind, put_cuts: list[int], get_cuts: list[int], flipped: int | None, falls_short: bool
) -> None:
    with TemporaryDirectory() as directory:
        disk = FaultyDisk(DiskFault.SHORT, range(3, 1 << 30, 3) if falls_short else range(0), only="preadv")
        with closing(small.open(directory, disk=disk)) as storage:
            page = sealed_page(label(1), PAGE_BYTES, put_cuts)
            joined = bytearray(bytes_of(page))
            if flipped is not None:
                joined[flipped] ^= 1
                start = 0
                for buffer in page.buffers:
                    buffer[:] = joined[start : start + len(buffer)]
                    start += len(buffer)
            storage.put([page], Level.CACHED)
            checksum = PageChecksum()
            found = blank_page(label(1), PAGE_BYTES, get_cuts)._replace(checksum=checksum)
            calls_count = len(disk.calls)
            assert storage.get([found]) == [Answer.HIT]
            assert len(disk.calls) - calls_count >= PAGE_BYTES // PIECE_BYTES, "it is read in pieces"
            assert bytes_of(found) == joined
            whole = PageChecksum()
            whole.add(0, [memoryview(joined)])
            assert checksum.of(PAGE_BYTES) == whole.of(PAGE_BYTES) is not None
            flaw = None if flipped is None else Flaw.HEADER if flipped < HEADER_BYTES else Flaw.PAYLOAD
            assert verify_buffers(found.buffers, found.label, checksum) is flaw
