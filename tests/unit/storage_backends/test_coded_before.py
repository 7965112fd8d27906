"""Coded stores, and objects of a bucket, that an earlier version wrote are read and extended by this one.

They hold, byte by byte, what docs/format.md says; here it is read from them without the product's own code.
"""

import hmac
import struct
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import obstore
import pytest
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_intdigest

from tests.support.bucket import LocalBucket
from tests.support.operations import present
from tests.unit.storage_backends.fixtures.write_coded import CODINGS, KEYS, KEYS_VARIABLE, KINDS, coded_pages
from tests.unit.storage_backends.fixtures.write_stores import HYBRID, STORED, WINDOWED, manifests, pages_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(params=sorted(FIXTURES.glob("coded_*.tar.gz")), ids=lambda path: path.name)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Return a directory with a copy of each store, by kind and coding."""
    monkeypatch.setenv(KEYS_VARIABLE, KEYS)
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=CODINGS)
def coding(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def url(stores: Path, kind: str, coding: str, request: pytest.FixtureRequest) -> str:
    """Return what names one of them; the objects of a bucket are put into one of today."""
    top = stores / kind / coding
    if kind != "bucket":
        return f"{kind}:{top}"
    bucket: LocalBucket = request.getfixturevalue("bucket")
    url = bucket.new_url()
    for path in top.rglob("*"):
        if path.is_file():
            obstore.put(bucket.client(url.rpartition("/")[2]), str(path.relative_to(top)), path.read_bytes())
    return url


def opened(url: str) -> Store:
    """Open a store as an engine does that has both identities."""
    storage = open_storage(url)
    for manifest in manifests():
        storage.register(manifest, {})
    return storage


def check_holds(url: str, pages: Sequence[PageIO]) -> None:
    """Check that a store holds these pages, byte by byte."""
    blanks = [page._replace(buffers=(memoryview(bytearray(page.buffers[0].nbytes)),)) for page in pages]
    with closing(VerifiedStorage(opened(url))) as storage:
        assert set(storage.exists([page.label for page in pages])) == {Answer.HIT}
        assert set(storage.get(blanks)) == {Answer.HIT}
    assert [bytes(page.buffers[0]) for page in blanks] == [bytes(page.buffers[0]) for page in pages]


def test_every_page_reads_as_it_was_written(url: str, coding: str) -> None:
    check_holds(url + CODINGS[coding], coded_pages())
    with closing(open_storage(url)) as storage:
        found = present(storage.manifests())
    assert {digest: manifest and manifest.model for digest, manifest in found.items()} == {
        WINDOWED: "fixture/windowed",
        HYBRID: "fixture/hybrid",
    }


def test_pages_that_are_added_stand_beside_the_former_ones(url: str, coding: str) -> None:
    added = pages_of({(HYBRID, "state"): STORED[HYBRID, "state"]})
    with closing(opened(url + CODINGS[coding])) as storage:
        assert set(storage.put([*coded_pages(), *added], Level.DURABLE)) == {Answer.STORED}
    check_holds(url + CODINGS[coding], [*coded_pages(), *added])


def number(text: bytes) -> int:
    return int.from_bytes(text, "little")


def payload_in(content: bytes, identity: bytes) -> bytes:
    """Return the payload of a coded object, which is to be what the document says."""
    header, coded = content[:128], content[128:]
    width, cipher, zeros, data_bytes, payload_bytes, key_id, nonce = struct.unpack_from("<BBHIQ8s12s", coded)
    body, tag = coded[36:-16], coded[-16:]
    assert (number(header[4:6]), number(header[112:120]), zeros) == (2, xxh3_64_intdigest(coded), 0)
    if cipher:
        owner = identity.hex() if identity.hex() in KEYS else "*"
        key = bytes.fromhex(dict(line.split() for line in KEYS.splitlines())[owner])
        assert key_id == hmac.digest(key, b"unified-cache-key-id-v1", "sha256")[:8]
        cipher_key = hmac.digest(key, b"unified-cache-page-key-v1" + identity, "sha256")
        body = AESGCM(cipher_key).decrypt(nonce, body + tag, header[:112] + coded[:24])
    else:
        assert not any(key_id + nonce + tag)
    data = body[8 : 8 + data_bytes]
    assert not any(body[8 + data_bytes :])
    payload = bytearray(payload_bytes)
    if width:
        lengths = struct.unpack_from(f"<{width}I", data)
        assert 4 * width + sum(lengths) == len(data)
        for place, length in enumerate(lengths):
            start = 4 * width + sum(lengths[:place])
            plane = data[start : start + length]
            is_kept = length == payload_bytes // width
            payload[place::width] = plane if is_kept else zstandard.decompress(plane)
    else:
        payload[:] = data
    assert number(body[:8]) == xxh3_64_intdigest(payload)
    return bytes(payload)


def test_objects_have_the_names_and_the_bytes_of_the_document(stores: Path, coding: str) -> None:
    expected = {page.label: bytes(page.buffers[0]) for page in coded_pages()}
    top = stores / "bucket" / coding
    names = {f"pages/{label.identity.hex()}/{label.key.hex()}.{label.pool}": label for label in expected}
    manifests = {f"manifests/{identity.hex()}.json" for identity in (WINDOWED, HYBRID)}
    assert {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()} == {*names, *manifests}
    seen: set[tuple[int, int]] = set()
    for name, label in names.items():
        content = (top / name).read_bytes()
        if coding == "plain":
            assert content == expected[label]
            continue
        assert payload_in(content, label.identity) == expected[label][128:]
        seen.add((content[128], content[129]))
    assert {width for width, _ in seen} == {"plain": set(), "encrypted": {0}}.get(coding, {1, 2})
    assert {cipher for _, cipher in seen} == {"plain": set(), "compressed": {0}}.get(coding, {1})
