"""Pages stored compressed and encrypted: bit by bit the same, beside pages as they are, and nothing else is a hit."""

import random
import struct
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.store_kinds import StoreKind
from unified_cache.core.errors import MissingExtraError, StorageError
from unified_cache.core.seal import CODED_VERSION, HEADER_BYTES, Label, may_be_coded, seal_buffers
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.offline.listing import empty_page, read_verified
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice, Undecoded
from unified_cache.testing.storage_contract import LAYOUT, MODEL, bytes_of, label

PAYLOAD_BYTES = 16 << 10
COMPRESS = CodingChoice(compress=True)
HEADERS_BYTES = HEADER_BYTES + 36
"""Before what is compressed or encrypted: of the object, then of the coding."""


def bf16_like(seed: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Make numbers as a model's KV has them: normal, in bfloat16."""
    numbers = np.random.default_rng(seed).normal(size=payload_bytes // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def float32_like(seed: int, count: int) -> bytes:
    numbers = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return numbers.tobytes()


def noise(seed: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    return random.Random(seed).randbytes(payload_bytes)


def page_of(named: Label, payload: bytes) -> PageIO:
    page = memoryview(bytearray(HEADER_BYTES) + payload)
    seal_buffers((page,), named)
    return PageIO(named, (page,))


def blank_like(page: PageIO, cuts: int = 1) -> PageIO:
    page_bytes = len(bytes_of(page))
    edges = [page_bytes * number // cuts for number in range(cuts + 1)]
    sizes = [end - start for start, end in pairwise(edges)]
    return PageIO(page.label, tuple(memoryview(bytearray(size)) for size in sizes))


def read_back(storage: Store, page: PageIO, cuts: int = 1) -> bytes | Answer:
    found = blank_like(page, cuts)
    (answer,) = storage.get([found])
    return bytes_of(found) if answer is Answer.HIT else answer


def object_in(backend: MemoryStorage, named: Label) -> bytearray:
    """Return a copy of an object as the store has it."""
    (length,) = backend.lengths([named])
    assert length is not None
    content = bytearray(length)
    assert backend.get([PageIO(named, (memoryview(content),))]) == [Answer.HIT]
    return content


def replace_object(backend: Store, named: Label, content: bytes | bytearray) -> None:
    backend.remove([named])
    assert backend.put([PageIO(named, (memoryview(content),))], Level.CACHED) == [Answer.STORED]


# Compression


@pytest.mark.parametrize("kind", StoreKind)
def test_a_page_is_stored_shorter_and_read_back_bit_by_bit_into_any_buffers(kind: StoreKind, tmp_path: Path) -> None:
    pages = [page_of(label(number), bf16_like(number)) for number in range(40)]
    with closing(VerifiedStorage(CodedStorage(kind.open(tmp_path / "store"), COMPRESS))) as storage:
        assert storage.put(pages, Level.DURABLE) == [Answer.STORED] * 40
        for cuts in (1, 2, 7):
            assert all(read_back(storage, page, cuts) == bytes_of(page) for page in pages)
        listed = storage.scan(pages[0].label.identity).objects
        assert sum(each.object_bytes for each in listed) < 0.8 * 40 * (HEADER_BYTES + PAYLOAD_BYTES)
        assert len({each.object_bytes for each in listed}) <= 4
        assert storage.flaws_count == {}
    with closing(kind.open(tmp_path / "store")) as uncoded:
        assert uncoded.get([blank_like(page) for page in pages]) == [Answer.MISS] * 40
        assert all(uncoded.exists([page.label for page in pages])), "what is not read as it is stays"


PAYLOADS = st.one_of(
    st.binary(max_size=3000),
    st.builds(bf16_like, st.integers(0, 1 << 30), st.integers(1, 3000).map(lambda count: 2 * count)),
    st.builds(noise, st.integers(0, 1 << 30), st.integers(0, 3000)),
    st.builds(lambda byte, count: bytes([byte]) * count, st.integers(0, 255), st.integers(0, 5000)),
    # fp8: the upper bits are alike; a state in float32
    st.builds(lambda seed, count: bytes(byte & 0x3F for byte in noise(seed, count)), st.integers(0, 99), st.just(2048)),
    st.builds(
        float32_like,
        st.integers(0, 99),
        st.integers(1, 2000),
    ),
)


@given(st.lists(PAYLOADS, min_size=1, max_size=4), st.booleans(), st.booleans(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_any_bytes_come_back_as_they_were_and_no_object_is_longer_than_its_page_and_headers(
    payloads: Sequence[bytes], compress: bool, is_encrypted: bool, cuts: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGE_KEYS", f"* {'17' * 32}")
        backend = MemoryStorage()
        choice = CodingChoice(compress, "env:PAGE_KEYS" if is_encrypted else "")
        storage = VerifiedStorage(CodedStorage(backend, choice))
        storage.register(manifest_of(MODEL, LAYOUT), {})
        pages = [page_of(label(number), payload) for number, payload in enumerate(payloads)]
        assert all(storage.put(pages, Level.CACHED))
        assert [read_back(storage, page, cuts) for page in pages] == [bytes_of(page) for page in pages]
        for page, length in zip(pages, backend.lengths([page.label for page in pages]), strict=True):
            page_bytes = len(bytes_of(page))
            assert length is not None
            assert length <= page_bytes + 60 * is_encrypted
            assert length == page_bytes or may_be_coded(page_bytes - HEADER_BYTES, length)


def test_pages_that_gain_nothing_are_stored_as_they_are_and_seldom_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    real = zstandard.ZstdCompressor

    class CountedCompressor:
        def __init__(self, **options: object) -> None:
            self._real = real(**options)  # type: ignore[arg-type]

        def compress(self, data: memoryview) -> bytes:
            tries.append(len(data))
            return self._real.compress(data)

    monkeypatch.setattr(zstandard, "ZstdCompressor", CountedCompressor)
    backend = MemoryStorage()
    storage = CodedStorage(backend, COMPRESS)
    pages = [page_of(label(number), noise(number)) for number in range(130)]
    assert all(storage.put(pages, Level.CACHED))
    assert backend.lengths([page.label for page in pages]) == [HEADER_BYTES + PAYLOAD_BYTES] * 130
    assert sum(tries) <= 3 * 3 * PAYLOAD_BYTES * 2, "three looks at one page, in planes of each width"


@pytest.mark.parametrize("kind", StoreKind)
def test_stores_with_and_without_compression_read_each_others_pages(kind: StoreKind, tmp_path: Path) -> None:
    url = f"{kind.value}:{tmp_path / 'store'}"
    pages = [page_of(label(number), bf16_like(number)) for number in range(8)]
    with closing(VerifiedStorage(open_storage(f"{url}#compress=lossless"))) as storage:
        assert all(storage.put(pages[:4], Level.CACHED))
    with closing(VerifiedStorage(open_storage(url))) as storage:
        assert all(storage.put(pages[4:], Level.CACHED))
        assert [read_back(storage, page) for page in pages] == list(map(bytes_of, pages))
        assert sorted({each.object_bytes for each in storage.scan(pages[0].label.identity).objects}) != [
            HEADER_BYTES + PAYLOAD_BYTES
        ]
    with closing(VerifiedStorage(open_storage(f"{url}#compress=lossless"))) as storage:
        assert [read_back(storage, page) for page in pages] == list(map(bytes_of, pages))
        assert storage.flaws_count == {}


@pytest.mark.parametrize("others", [Answer.UNAVAILABLE, Answer.MISS])
def test_a_page_that_a_store_does_not_give_now_costs_no_other_page_its_answer(others: Answer) -> None:
    class ResetStorage(MemoryStorage):
        """A store that gives the first page of a batch, and then fails."""

        asked_count = 0

        def get(self, pages: Sequence[PageIO]) -> list[Answer]:
            self.asked_count += len(pages)
            return super().get(pages[:1]) + [others] * (len(pages) - 1)

        def lengths(self, labels: Sequence[Label]) -> list[int | None]:
            raise StorageError("reset", retryable=True)

    backend = ResetStorage()
    pages = [page_of(label(number), bf16_like(number)) for number in range(3)]
    backend.put(pages, Level.CACHED)
    found = CodedStorage(backend, None).get(list(map(blank_like, pages)))
    assert found == [Answer.HIT, Answer.UNAVAILABLE, Answer.UNAVAILABLE]
    assert backend.asked_count == 3


def test_tools_verify_a_coded_object_by_its_own_seal_without_a_key() -> None:
    backend = MemoryStorage()
    page = page_of(label(1), bf16_like(1))
    CodedStorage(backend, COMPRESS).put([page], Level.CACHED)
    (listed,) = backend.scan(page.label.identity).objects
    assert [each.outcome for each in read_verified(backend, [empty_page(listed)])] == [Answer.HIT]
    content = object_in(backend, page.label)
    content[HEADERS_BYTES + 20] ^= 1
    replace_object(backend, page.label, content)
    assert [each.outcome for each in read_verified(backend, [empty_page(listed)])] == [Answer.FLAWED]


def coded_object(named: Label, fields: tuple[int, int, int, int, int], body: bytes) -> bytes:
    """Make an object of any content whose seal holds, as one can who writes to the store."""
    part = max(256, PAYLOAD_BYTES // 64)
    body += bytes(-len(body) % part)
    content = bytearray(HEADER_BYTES) + struct.pack("<BBHIQ8s12s", *fields, b"", b"") + body + bytes(16)
    seal_buffers((memoryview(content),), named, CODED_VERSION)
    return bytes(content)


def bomb(expanded_bytes: int, *, says_so: bool) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=says_so).compress(bytes(expanded_bytes))


def with_planes(*planes: bytes, width: int = 1) -> bytes:
    return bytes(8) + struct.pack(f"<{width}I", *map(len, planes)) + b"".join(planes)


BOMBS: dict[str, tuple[int, bytes, int]] = {
    "expands to a hundred times the page": (1, with_planes(bomb(100 * PAYLOAD_BYTES, says_so=True)), PAYLOAD_BYTES),
    "expands and does not say so": (1, with_planes(bomb(100 * PAYLOAD_BYTES, says_so=False)), PAYLOAD_BYTES),
    "expands to one byte more": (1, with_planes(bomb(PAYLOAD_BYTES + 1, says_so=True)), PAYLOAD_BYTES),
    "expands to less": (1, with_planes(bomb(PAYLOAD_BYTES - 1, says_so=True)), PAYLOAD_BYTES),
    "is of a longer page": (1, with_planes(bomb(PAYLOAD_BYTES, says_so=True)), 1 << 40),
    "is of no known width": (3, with_planes(b"abc"), PAYLOAD_BYTES),
    "has planes longer than the page": (2, with_planes(b"", bytes(PAYLOAD_BYTES - 600), width=2), PAYLOAD_BYTES),
    "is no frame": (1, with_planes(b"\x28\xb5\x2f\xfd" + bytes(40)), PAYLOAD_BYTES),
    "has a table beyond its end": (4, bytes(8) + b"\xff" * 6, PAYLOAD_BYTES),
    "has other planes than its table": (2, with_planes(b"a", width=1) + bytes(30), PAYLOAD_BYTES),
}


@pytest.mark.threat("objects that expand")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_miss_before_it_is_made_and_the_page_can_be_put_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, data, payload_bytes = BOMBS[name]
    made: list[int] = []
    real = zstandard.ZstdDecompressor

    class CountedDecompressor:
        def decompress(self, frame: memoryview, **options: bool) -> bytes:
            content = real().decompress(frame, **options)
            made.append(len(content))
            return content

    monkeypatch.setattr(zstandard, "ZstdDecompressor", CountedDecompressor)
    backend = MemoryStorage()
    storage = CodedStorage(backend, COMPRESS)
    page = page_of(label(1), bf16_like(1))
    content = coded_object(page.label, (width, 0, 0, len(data) - 8, payload_bytes), data)
    replace_object(backend, page.label, content)
    assert read_back(storage, page) is Answer.FLAWED
    assert storage.undecoded_counts == {Undecoded.DAMAGED: 1}
    assert max(made, default=0) <= PAYLOAD_BYTES
    assert storage.exists([page.label]) == [Answer.MISS]
    assert storage.put([page], Level.CACHED) == [Answer.STORED]
    assert read_back(storage, page) == bytes_of(page)


def test_a_cut_or_changed_object_is_never_a_hit() -> None:
    backend = MemoryStorage()
    storage = VerifiedStorage(CodedStorage(backend, COMPRESS))
    page = page_of(label(1), bf16_like(1))
    storage.put([page], Level.CACHED)
    content = object_in(backend, page.label)
    rng = random.Random(3)
    for number in range(300):
        changed = bytearray(content)
        if number % 3 == 0:
            del changed[rng.randrange(len(changed)) :]
        else:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            if number % 3 == 1:  # by somebody who knows how to seal
                seal_buffers((memoryview(changed),), page.label, CODED_VERSION)
        replace_object(backend, page.label, changed)
        assert read_back(storage, page) in (Answer.FLAWED, bytes_of(page))


def test_a_frame_that_holds_another_page_is_found_by_the_seal_of_the_page() -> None:
    backend = MemoryStorage()
    layer = CodedStorage(backend, COMPRESS)
    storage = VerifiedStorage(layer)
    page, other = (page_of(label(number), bf16_like(number)) for number in (1, 2))
    layer.put([page, other], Level.CACHED)
    content, swapped = object_in(backend, page.label), object_in(backend, other.label)
    content[HEADERS_BYTES + 8 :] = swapped[HEADERS_BYTES + 8 :]  # its checksum stays
    content[HEADER_BYTES:HEADERS_BYTES] = swapped[HEADER_BYTES:HEADERS_BYTES]
    seal_buffers((memoryview(content),), page.label, CODED_VERSION)
    replace_object(backend, page.label, content)
    assert read_back(storage, page) is Answer.FLAWED
    assert sum(storage.flaws_count.values()) == 1


def test_a_reader_without_the_package_leaves_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryStorage()
    page = page_of(label(1), bf16_like(1))
    CodedStorage(backend, COMPRESS).put([page], Level.CACHED)
    module = "unified_cache.storage_backends.wrappers.compression"
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"unified-cache\[compress\]"):
        CodedStorage(backend, COMPRESS)
    storage = CodedStorage(backend, None)
    assert read_back(storage, page) is Answer.UNAVAILABLE
    assert storage.undecoded_counts == {Undecoded.NO_CODEC: 1}
    assert backend.exists([page.label]) == [Answer.HIT]
