"""Encrypted stores: nothing of a page can be read in one, and nothing that was made without its key is a hit."""

import logging
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tests.support.store_kinds import StoreKind
from tests.unit.storage_backends.wrappers.test_coded import (
    bf16_like,
    noise,
    object_in,
    page_of,
    read_back,
    replace_object,
)
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Identity
from unified_cache.core.seal import CODED_VERSION, HEADER_BYTES, Label, seal_buffers
from unified_cache.storage_backends.manifest import EVERYBODY, manifest_of, model_of_tenant
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import coded, page_keys
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice, Undecoded
from unified_cache.storage_backends.wrappers.page_keys import RELOADED_S, PageKeys
from unified_cache.testing.storage_contract import LAYOUT, MODEL, bytes_of, label

OLD, NEW, LOST = "0a" * 32, "1b" * 32, "2c" * 32


def key_file(tmp_path: Path, *lines: str) -> Path:
    """Write keys as an operator should: whole, under another name, then renamed."""
    path, new = tmp_path / "keys", tmp_path / "keys.new"
    new.write_text("".join(f"{line}\n" for line in lines))
    new.chmod(0o600)
    return new.replace(path)


def encrypted(
    backend: MemoryStorage, path: Path, *, compress: bool = False, clock: Callable[[], float] = time.monotonic
) -> CodedStorage:
    """Open a layer over a store, as an engine does whose identity is MODEL."""
    storage = CodedStorage(backend, CodingChoice(compress, f"file:{path}"), clock)
    storage.register(manifest_of(MODEL, LAYOUT), {})
    return storage


def windows(content: bytes) -> set[bytes]:
    return {content[start : start + 16] for start in range(len(content) - 15)}


@pytest.mark.threat("pages read from the disk")
@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("compress", ["none", "lossless"])
def test_no_run_of_16_bytes_of_any_payload_lies_in_any_file_of_the_store(
    compress: str, kind: StoreKind, tmp_path: Path
) -> None:
    path = key_file(tmp_path, f"* {OLD}")
    payloads = [bf16_like(1, 4096), noise(2, 3000), bf16_like(3, 4096), noise(4, 1076)]
    pages = [page_of(label(number), payload) for number, payload in enumerate(payloads)]
    url = f"{kind.value}:{tmp_path / 'store'}#compress={compress}&keys=file:{path}"
    with closing(open_storage(url)) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        assert all(storage.put(pages, Level.DURABLE))
    secret = {window for payload in payloads for window in windows(payload)}
    files = [each for each in (tmp_path / "store").rglob("*") if each.is_file()]
    assert any(pages[0].label.key in each.read_bytes() for each in files), "names are in the clear"
    for each in files:
        for part in re.split(rb"\0{64,}", each.read_bytes()):
            assert secret.isdisjoint(windows(part))
    with closing(VerifiedStorage(open_storage(url))) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        assert [read_back(storage, page) for page in pages] == list(map(bytes_of, pages))


# What somebody who may write the store can do to it


def resealed(content: bytes | bytearray, named: Label) -> bytearray:
    changed = bytearray(content)
    seal_buffers((memoryview(changed),), named, CODED_VERSION)
    return changed


def objects_of_an_attacker(rng: random.Random, tmp_path: Path, named: Label) -> dict[str, tuple[bytearray, Undecoded]]:
    """Make one object of each kind for a page's name, sealed as it should be, and why it is refused."""
    payload = bf16_like(rng.randrange(1 << 30), 4096)
    key_file(tmp_path, f"* {OLD}")
    backend = MemoryStorage()
    ours = encrypted(backend, tmp_path / "keys")
    ours.own([Identity("contract/model", generation=1).digest(LAYOUT)], EVERYBODY)
    elsewhere = [
        named._replace(key=rng.randbytes(32)),
        named._replace(pool="kv_index"),
        named._replace(identity=Identity("contract/model", generation=1).digest(LAYOUT)),
    ]
    ours.put([page_of(each, payload) for each in (named, *elsewhere)], Level.CACHED)
    sound = object_in(backend, named)
    flipped = bytearray(sound)
    flipped[rng.randrange(HEADER_BYTES + 24, len(flipped))] ^= 1 << rng.randrange(8)
    declared = bytearray(sound)
    declared[rng.choice((HEADER_BYTES, HEADER_BYTES + 2, HEADER_BYTES + 3))] ^= 1
    forged = sound[: HEADER_BYTES + 24] + rng.randbytes(len(sound) - HEADER_BYTES - 24)
    made = {
        "forged": (resealed(forged, named), Undecoded.FORGED),
        "flipped": (resealed(flipped, named), Undecoded.FORGED),
        "declared otherwise": (resealed(declared, named), Undecoded.FORGED),
        "of another page": (resealed(object_in(backend, elsewhere[0]), named), Undecoded.FORGED),
        "of another pool": (resealed(object_in(backend, elsewhere[1]), named), Undecoded.FORGED),
        "of an earlier generation": (resealed(object_in(backend, elsewhere[2]), named), Undecoded.FORGED),
        "as it is": (bytearray(bytes_of(page_of(named, payload))), Undecoded.UNENCRYPTED),
    }
    backend = MemoryStorage()
    CodedStorage(backend, CodingChoice(compress=True)).put([page_of(named, payload)], Level.CACHED)
    made["compressed"] = (object_in(backend, named), Undecoded.UNENCRYPTED)
    key_file(tmp_path, f"* {LOST}")
    backend = MemoryStorage()
    encrypted(backend, tmp_path / "keys").put([page_of(named, payload)], Level.CACHED)
    made["under another tenant's key, or a lost one"] = (object_in(backend, named), Undecoded.NO_KEY)
    damaged = bytearray(sound)
    damaged[-1] ^= 1
    made["damaged"] = (damaged, Undecoded.DAMAGED)
    return made


@pytest.mark.threat("forged pages")
def test_200_forged_swapped_and_replayed_objects_are_misses_counted_and_put_again(tmp_path: Path) -> None:
    rng = random.Random(11)
    backend = MemoryStorage()
    expected: dict[Undecoded, int] = {}
    tried_count = 0
    path = key_file(tmp_path, f"* {OLD}")
    layer = encrypted(backend, path)
    storage = VerifiedStorage(layer)
    for number in range(20):
        page = page_of(label(number), bf16_like(number, 4096))
        for name, (content, reason) in objects_of_an_attacker(rng, tmp_path, page.label).items():
            key_file(tmp_path, f"* {OLD}")
            replace_object(backend, page.label, content)
            assert read_back(storage, page) in (Answer.MISS, Answer.FLAWED), name
            expected[reason] = expected.get(reason, 0) + 1
            tried_count += 1
            assert layer.undecoded_counts == expected, name
            # What another process may be able to read stays until the page is put.
            stays = reason in (Undecoded.UNENCRYPTED, Undecoded.NO_KEY)
            assert backend.exists([page.label]) == [Answer.HIT if stays else Answer.MISS], name
            assert storage.exists([page.label]) == [Answer.MISS], name
            assert storage.put([page], Level.CACHED) == [Answer.STORED], name
            assert read_back(storage, page) == bytes_of(page), name
    assert tried_count == 200
    assert storage.flaws_count == {}


@pytest.mark.threat("forged pages")
def test_the_key_of_one_tenant_opens_and_makes_no_page_of_another(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"@acme {OLD}", f"@zeta {NEW}", f"{MODEL.digest(LAYOUT).hex()} {LOST}")
    tenants = {name: Identity(model_of_tenant(name, "m")) for name in ("acme", "zeta", "nobody")}
    pages = {
        name: page_of(Label(identity.digest(LAYOUT), bytes(32), "kv"), bf16_like(5, 4096))
        for name, identity in tenants.items()
    }
    pages["by identity"] = page_of(label(1), bf16_like(5, 4096))
    url = f"file:{tmp_path / 'store'}#keys=file:{path}"
    with closing(open_storage(url)) as storage:
        for identity in tenants.values():
            storage.register(manifest_of(identity, LAYOUT), {})
        answers = {name: storage.put([page], Level.CACHED)[0] for name, page in pages.items()}
    assert answers == {**dict.fromkeys(pages, Answer.STORED), "nobody": Answer.DECLINED}
    key_file(tmp_path, f"@acme {NEW}", f"@zeta {NEW}", f"@zeta {OLD}")
    with closing(open_storage(url)) as storage:
        assert isinstance(storage, CodedStorage)
        # Nobody has said whose pages they are but where a key is an identity's own.
        assert read_back(storage, pages["zeta"]) is Answer.MISS
        assert storage.undecoded_counts == {Undecoded.NO_OWNER: 1}
    with closing(open_storage(url)) as storage:
        assert isinstance(storage, CodedStorage)
        for name, identity in tenants.items():
            storage.own([identity.digest(LAYOUT)], f"@{name}")
        storage.own([MODEL.digest(LAYOUT)], EVERYBODY)
        # Of acme's old key zeta has a copy.
        assert read_back(storage, pages["zeta"]) == bytes_of(pages["zeta"])
        assert read_back(storage, pages["acme"]) is Answer.MISS
        assert read_back(storage, pages["by identity"]) is Answer.MISS
        assert storage.undecoded_counts == {Undecoded.NO_KEY: 2}
    key_file(tmp_path, f"* {OLD}")
    with closing(open_storage(url)) as storage:
        assert isinstance(storage, CodedStorage)
        storage.own([tenants["acme"].digest(LAYOUT)], "@acme")
        assert read_back(storage, pages["acme"]) == bytes_of(pages["acme"]), "a key is its bytes, whoever owns it"


@pytest.mark.threat("forged pages")
def test_a_manifest_under_another_digest_than_its_own_does_not_say_whose_pages_are(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"@acme {OLD}", f"* {NEW}")
    acme = Identity(model_of_tenant("acme", "m"))
    page = page_of(Label(acme.digest(LAYOUT), bytes(32), "kv"), bf16_like(5, 4096))
    url = f"file:{tmp_path / 'store'}#keys=file:{path}"
    with closing(open_storage(url)) as forger:
        assert isinstance(forger, CodedStorage)
        forger.register(manifest_of(acme, LAYOUT), {})
        forger.own([page.label.identity], EVERYBODY)
        assert forger.put([page], Level.CACHED) == [Answer.STORED]
        assert read_back(forger, page) == bytes_of(page)
    (manifest,) = (tmp_path / "store").rglob("manifest.json")
    manifest.write_text(manifest.read_text().replace("@acme/m", "m"))
    with closing(open_storage(url)) as storage:
        assert page.label.identity in (storage.manifests() or {})
        assert read_back(storage, page) is Answer.MISS


def test_a_reader_without_keys_leaves_encrypted_pages_where_they_are(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"* {OLD}")
    backend = MemoryStorage()
    page = page_of(label(1), bf16_like(1))
    encrypted(backend, path).put([page], Level.CACHED)
    bare = CodedStorage(backend, None)
    assert read_back(bare, page) is Answer.UNAVAILABLE
    assert bare.undecoded_counts == {Undecoded.NO_KEY: 1}
    assert read_back(encrypted(backend, path), page) == bytes_of(page)


def test_what_is_remembered_of_objects_of_others_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "UNREADABLE_MAX", 8)
    monkeypatch.setattr(coded, "OWNERS_MAX", 8)
    monkeypatch.setattr(page_keys, "CIPHERS_MAX", 8)
    backend, path = MemoryStorage(), key_file(tmp_path, f"* {LOST}")
    pages = [page_of(Label(bytes([number] * 32), bytes(32), "kv"), bf16_like(number, 512)) for number in range(40)]
    storage = encrypted(backend, path)
    for page in pages:
        storage.own([page.label.identity], EVERYBODY)
        assert storage.put([page], Level.CACHED) == [Answer.STORED]
    assert storage.put([pages[0]], Level.CACHED) == [Answer.DECLINED], "whose it is was 39 identities ago"
    assert storage.undecoded_counts == {Undecoded.NO_OWNER: 1}
    key_file(tmp_path, f"* {NEW}")
    storage = encrypted(backend, path)

    def found(page: PageIO) -> bytes | Answer:
        storage.own([page.label.identity], EVERYBODY)
        return read_back(storage, page)

    assert list(map(found, pages)) == [Answer.MISS] * 40
    assert storage.undecoded_counts == {Undecoded.NO_KEY: 40}
    assert storage.exists([page.label for page in pages]).count(Answer.MISS) <= 8, "the others are found again"
    for page in pages:
        assert found(page) is Answer.MISS
        assert storage.put([page], Level.CACHED) == [Answer.STORED]
    assert list(map(found, pages)) == list(map(bytes_of, pages))


def test_the_same_page_is_never_encrypted_twice_to_the_same_bytes(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"* {OLD}")
    page = page_of(label(1), bf16_like(1))
    contents: list[bytes] = []
    for backend in (MemoryStorage(), MemoryStorage()):
        encrypted(backend, path).put([page], Level.CACHED)
        contents.append(bytes(object_in(backend, page.label)))
    first, second = (windows(content[HEADER_BYTES + 24 :]) for content in contents)
    assert first.isdisjoint(second)


# Rotation


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("keys", ["", "&keys=file:{}"])
def test_a_durable_put_replaces_a_page_that_is_encrypted_with_a_key_not_known_here(
    kind: StoreKind, keys: str, tmp_path: Path
) -> None:
    path, page = tmp_path / "keys", page_of(label(1), bf16_like(1))
    url = f"{kind.value}:{tmp_path}/store#compress=lossless"
    for key, coding in ((OLD, "&keys=file:{}"), (NEW, keys)):
        key_file(tmp_path, f"* {key}")
        with closing(open_storage(url + coding.format(path))) as storage:
            storage.register(manifest_of(MODEL, LAYOUT), {})
            assert storage.put([page], Level.DURABLE) == [Answer.STORED]
            assert read_back(storage, page) == bytes_of(page)


def test_a_rotation_under_load_causes_no_miss(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"* {OLD}")
    backend, clock = MemoryStorage(), ManualClock()
    processes = [VerifiedStorage(encrypted(backend, path, compress=True, clock=clock)) for _ in range(2)]
    pages = [page_of(label(number), bf16_like(number, 2048)) for number in range(60)]
    wrong: list[object] = []

    def serve(start: int) -> None:
        for number in range(start, start + 15):
            processes[number % 2].put([pages[number]], Level.CACHED)
            for reader in processes:
                known = random.Random(number).randrange(number - start + 1) + start
                found = read_back(reader, pages[known])
                if found != bytes_of(pages[known]):
                    wrong.append(found)

    for turn, keys in enumerate(([OLD], [OLD, NEW], [OLD, NEW], [NEW, LOST], [NEW, LOST])):
        key_file(tmp_path, *(f"* {key}" for key in keys))
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(serve, (0, 15, 30, 45)))
        clock.sleep(RELOADED_S)
        if turn == 1:  # what the old key wrote may go: put again, by the new one
            backend.remove([page.label for page in pages])
    assert wrong == []


def test_a_process_that_meets_a_key_it_does_not_know_reads_the_keys_at_once_and_seldom_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = key_file(tmp_path, f"* {OLD}")
    backend, clock = MemoryStorage(), ManualClock()
    reader = encrypted(backend, path, clock=clock)
    page = page_of(label(1), bf16_like(1))
    key_file(tmp_path, f"* {OLD}", f"* {NEW}")
    encrypted(backend, path, clock=clock).put([page], Level.CACHED)
    assert read_back(reader, page) == bytes_of(page)
    reads: list[Path] = []

    def read(path: Path, forbidden: int) -> bytes:
        reads.append(path)
        return path.read_bytes()

    monkeypatch.setattr(page_keys, "read_kept", read)
    keys = PageKeys(f"file:{path}", clock)
    for _ in range(50):
        assert keys.reading(page.label.identity, EVERYBODY, b"unknown.") is None
    assert len(reads) == 2


def test_a_process_that_only_reads_believes_no_key_10_s_after_it_was_removed(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"* {OLD}", f"* {NEW}")
    backend, clock = MemoryStorage(), ManualClock()
    page = page_of(label(1), bf16_like(1))
    reader = encrypted(backend, path, clock=clock)
    encrypted(backend, path, clock=clock).put([page], Level.CACHED)
    assert read_back(reader, page) == bytes_of(page)
    key_file(tmp_path, f"* {OLD}")
    clock.sleep(RELOADED_S)
    assert read_back(reader, page) is Answer.MISS
    assert reader.undecoded_counts == {Undecoded.NO_KEY: 1}


@pytest.mark.parametrize("writes", [False, True])
def test_a_key_that_comes_after_the_first_page_with_it_is_believed_10_s_later_by_exists_and_get(
    writes: bool, tmp_path: Path
) -> None:
    path = key_file(tmp_path, f"* {OLD}")
    backend, clock = MemoryStorage(), ManualClock()
    page, other = page_of(label(1), bf16_like(1)), page_of(label(2), bf16_like(2))
    reader = encrypted(backend, path, clock=clock)
    encrypted(backend, key_file(tmp_path, f"* {NEW}")).put([page], Level.CACHED)
    key_file(tmp_path, f"* {OLD}")
    assert read_back(reader, page) is Answer.MISS
    assert reader.exists([page.label]) == [Answer.MISS]
    key_file(tmp_path, f"* {OLD}", f"* {NEW}")
    clock.sleep(RELOADED_S)
    if writes:
        reader.put([other], Level.CACHED)
    assert reader.exists([page.label]) == [Answer.HIT]
    assert read_back(reader, page) == bytes_of(page)


def test_keys_whose_text_cannot_be_read_hold_for_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    path = key_file(tmp_path, f"* {OLD}")
    keys = PageKeys(f"file:{path}", clock)
    clock.sleep(3600.0)
    path.unlink()
    held: list[bool] = []
    for _ in range(8):
        held.append(keys.writing(bytes(32), EVERYBODY) is not None)
        clock.sleep(RELOADED_S)
    assert held == [True] * 7 + [False]
    assert len(caplog.records) == 2, "when it began, and when none holds any more"
    key_file(tmp_path, f"* {OLD}")
    assert keys.writing(bytes(32), EVERYBODY) is not None


# Where keys come from, and where they never go


@pytest.mark.threat("leaked credentials")
@pytest.mark.parametrize("text", [OLD, f"* {OLD[:-1]}", f"* {OLD} {NEW}", f"acme {OLD}", f"@acme {OLD[:-2]}zz"])
def test_no_key_is_in_an_error_a_log_or_a_repr(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PAGE_KEYS", text)
    with pytest.raises(ConfigError) as refused:
        open_storage("memory:#keys=env:PAGE_KEYS")
    monkeypatch.setenv("PAGE_KEYS", f"* {OLD}")
    clock = ManualClock()
    keys = PageKeys("env:PAGE_KEYS", clock)
    monkeypatch.setenv("PAGE_KEYS", text)
    clock.sleep(RELOADED_S)
    key = keys.writing(bytes(32), EVERYBODY)
    assert key is not None, "those that were read before count"
    said = f"{refused.value!r} {refused.value.__cause__!r} {keys!r} {key!r} {caplog.text}"
    assert OLD[:16] not in said
    assert bytes.fromhex(OLD[:16]) not in said.encode()


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("source", ["file:/no/such/file", "file:/dev/null", "env:NO_SUCH_KEYS", "vault:x", "env:"])
def test_keys_that_cannot_be_had_are_refused_and_the_store_is_made_nowhere(
    source: str, kind: StoreKind, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="keys"):
        open_storage(f"{kind.value}:{tmp_path / 'store'}#keys={source}")
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_know_lengths_is_not_coded() -> None:
    with pytest.raises(ConfigError, match="give them to the service"):
        open_storage("grpc://127.0.0.1:1#compress=lossless")


@pytest.mark.parametrize("text", ["compress=zip", "keys=", "compress=lossless&level=3", "compress"])
def test_what_nobody_knows_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match="compress=lossless and keys=SOURCE"):
        CodingChoice.of(text)


@pytest.mark.threat("leaked credentials")
@pytest.mark.parametrize("mode", [0o660, 0o604, 0o666])
def test_a_file_of_keys_that_others_may_read_or_the_group_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    path = key_file(tmp_path, f"* {OLD}")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="kept from others"):
        open_storage(f"memory:#keys=file:{path}")


def test_each_identity_s_pages_are_read_by_who_has_opened_no_other_s(tmp_path: Path) -> None:
    path, backend = key_file(tmp_path, f"* {OLD}"), MemoryStorage()
    other = Identity("contract/model", generation=1).digest(LAYOUT)
    pages = [page_of(named, bf16_like(1, 4096)) for named in (label(1), label(1)._replace(identity=other))]
    writer = encrypted(backend, path)
    writer.own([other], EVERYBODY)
    assert all(writer.put(pages, Level.CACHED))
    for page in pages:
        reader = encrypted(backend, path)
        reader.own([other], EVERYBODY)
        assert read_back(VerifiedStorage(reader), page) == bytes_of(page)
