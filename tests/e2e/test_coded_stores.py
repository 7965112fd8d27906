"""Compressed and encrypted stores from everywhere that takes the URL of a store, without an engine's own packages."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.test_service_administration import token_of
from tests.support.bucket import LocalBucket
from tests.support.cluster import ServeProcess, ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill, restored_pages
from tests.support.running_service import running
from tests.unit.storage_backends.wrappers.test_coded import bf16_like, blank_like, page_of, read_back
from unified_cache.components import Full
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import Label
from unified_cache.storage_backends.manifest import EVERYBODY, manifest_of, model_of_tenant
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.testing.storage_contract import bytes_of

LAYOUT = LAYOUTS["full_swa_mamba"]
TOKENS = [np.random.default_rng(number).integers(0, 1000, PAGES * PAGE_SIZE).tolist() for number in (1, 2)]
PROMPTS = [Prompt.of(tokens, PAGE_SIZE, whole=True) for tokens in TOKENS]
CODED = "#compress=lossless&keys=env:PAGE_KEYS"

KV = ModelLayout(64, (Full((PoolSpec("kv", 8192),)),))
MODEL = Identity("m")
LABELS = [Label(MODEL.digest(KV), bytes([number] * 32), "kv") for number in range(6)]
PAGES_OF_KV = [page_of(label, bf16_like(number, 8192)) for number, label in enumerate(LABELS)]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE_KEYS", f"* {'3d' * 32}")


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    return memory_path


def test_backup_and_prefetch_copy_into_an_encrypted_store_and_out_of_it(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("\n".join(map(json.dumps, TOKENS)), encoding="utf-8")
    plain, coded, back, into = (f"file:{tmp_path / name}" for name in ("plain", "coded", "back", "into"))
    fill(open_storage(plain), LAYOUT, PROMPTS)
    assert ask("backup", plain, coded + CODED).status == 0
    verified = json.loads(ask("storage", "verify", coded, "--json").out)["identities"]
    assert [(each["objects"], each["findings"]) for each in verified] == [(verified[0]["sound"], [])]
    assert ask("storage", "gc", coded).status == 0
    assert json.loads(ask("backup", plain, coded + CODED, "--json").out)["identities"][0]["copied_objects"] == 0
    refused = ask("backup", coded, back)
    assert (refused.status, "cannot be read" in refused.err) == (1, True)
    assert ask("backup", coded + CODED, back).status == 0
    assert ask("prefetch", coded + CODED, "--into", into + CODED, "--tokens", tokens).status == 0
    for url in (coded + CODED, back, into + CODED):
        assert [restored_pages(open_storage(url), LAYOUT, prompt) for prompt in PROMPTS] == [PAGES, PAGES]


def test_a_service_keeps_the_pages_of_a_tenant_under_the_tenants_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_KEYS", f"@default {'4e' * 32}")
    store = tmp_path / "store"
    for is_first in (True, False):
        with (
            running(storage=f"file:{store}{CODED}") as server,
            closing(open_storage(f"grpc://{server.address}")) as client,
        ):
            client.register(manifest_of(MODEL, KV), {})
            if is_first:
                assert client.put(PAGES_OF_KV, Level.CACHED) == [Answer.STORED] * 6
            assert [read_back(client, page) for page in PAGES_OF_KV] == list(map(bytes_of, PAGES_OF_KV))
            if not is_first:
                forged = next(path for path in store.rglob("*.kv") if path.stem == PAGES_OF_KV[0].label.key.hex())
                forged.write_bytes(bytes_of(page_of(PAGES_OF_KV[0].label, bf16_like(9, 8192))))
                assert client.get([blank_like(PAGES_OF_KV[0])]) == [Answer.MISS]
                assert server.metrics()['unified_cache_service_flawed_pages_total{flaw="unencrypted"}'] == 1
    *sizes, forged_bytes = sorted(path.stat().st_size for path in store.rglob("*.kv"))
    assert max(sizes) < 0.75 * forged_bytes


def plant(store: Path, label: Label, content: bytes) -> Path:
    """Put an object in the place of a page, as whoever may write the store."""
    (place,) = (each for each in store.rglob("*.kv") if each.stem == label.key.hex())
    place.write_bytes(content)
    return place


def sealed_by_everybody(page: PageIO, tmp_path: Path) -> bytes:
    """Return the object that the key of everybody makes of a page, whosever it is."""
    forger = tmp_path / "forger"
    with closing(open_storage(f"file:{forger}{CODED}")) as storage:
        assert isinstance(storage, CodedStorage)
        storage.own([page.label.identity], EVERYBODY)
        assert storage.put([page], Level.CACHED) == [Answer.STORED]
    (made,) = forger.rglob("*.kv")
    return made.read_bytes()


@pytest.mark.threat("forged pages")
@pytest.mark.parametrize("manifest", ["gone", "empty", "another owner's"])
def test_a_service_that_was_started_again_takes_no_page_of_a_tenant_by_the_key_of_everybody_whatever_the_store_says(
    manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_KEYS", f"* {'3d' * 32}\n@acme {'4e' * 32}")
    store, tokens = tmp_path / "store", tmp_path / "tokens"
    reader, writer = (token_of(tokens, "acme", role, tmp_path) for role in ("reader", "writer"))
    stored = Identity(model_of_tenant("acme", MODEL.model))
    kept = store / stored.digest(KV).hex() / "manifest.json"
    planted, other, *later = PAGES_OF_KV
    variables = {"STORAGE": f"file:{store}{CODED}", "ACCESS__TOKENS": str(tokens), "AUDIT__FILE": str(tmp_path / "log")}
    with ServeProcess(variables=variables) as server:
        with closing(open_storage(f"grpc://{server.address}?token_file={writer}")) as client:
            client.register(manifest_of(MODEL, KV), {})
            assert client.put([planted, other], Level.CACHED) == [Answer.STORED] * 2
        server.kill()
        forged = page_of(planted.label._replace(identity=stored.digest(KV)), bf16_like(99, 8192))
        plant(store, planted.label, sealed_by_everybody(forged, tmp_path))
        if manifest == "gone":
            kept.unlink()
        else:
            kept.write_text("" if manifest == "empty" else kept.read_text().replace("@acme/m", "m"))
        server.start()
        with closing(open_storage(f"grpc://{server.address}?token_file={reader}")) as client:
            client.register(manifest_of(MODEL, KV), {})
            client.manifests()  # the service lists its store for that
            assert [read_back(client, page) for page in (planted, other)] == [Answer.MISS, bytes_of(other)]
        with closing(open_storage(f"grpc://{server.address}?token_file={writer}")) as client:
            client.register(manifest_of(MODEL, KV), {})
            assert client.put(later, Level.CACHED) == [Answer.STORED] * len(later)
            assert [read_back(client, page) for page in later] == list(map(bytes_of, later))
    ids = {each.stem: each.read_bytes()[144:152] for each in store.rglob("*.kv")}
    assert len({ids[page.label.key.hex()] for page in (other, *later)}) == 1, "all of one key, the tenant's"
    assert ids[planted.label.key.hex()] not in {ids[other.label.key.hex()]}


def test_a_tool_reads_an_encrypted_store_by_the_owners_that_digests_of_identities_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_KEYS", f"* {'3d' * 32}\n@acme {'4e' * 32}")
    store = tmp_path / "store"
    named = Identity(model_of_tenant("acme", "m"))
    pages = [page_of(label._replace(identity=named.digest(KV)), bf16_like(n, 8192)) for n, label in enumerate(LABELS)]
    with closing(open_storage(f"file:{store}{CODED}")) as storage:
        storage.register(manifest_of(named, KV), {})
        assert storage.put(pages, Level.CACHED) == [Answer.STORED] * 6
    copied = json.loads(ask("backup", f"file:{store}{CODED}", f"file:{tmp_path / 'copy'}", "--json").out)
    assert copied["identities"][0]["copied_objects"] == 6
    forged = page_of(pages[0].label, bf16_like(99, 8192))
    plant(store, pages[0].label, sealed_by_everybody(forged, tmp_path))
    copied = json.loads(ask("backup", f"file:{store}{CODED}", f"file:{tmp_path / 'second'}", "--json").out)
    assert copied["identities"][0]["copied_objects"] == 5
    (kept,) = store.rglob("manifest.json")
    kept.write_text(kept.read_text().replace("@acme/m", "m"))
    assert ask("backup", f"file:{store}{CODED}", f"file:{tmp_path / 'third'}").status == 1
    assert list((tmp_path / "third").rglob("*.kv")) == []


@pytest.mark.parametrize("coding", ["", CODED], ids=["by its objects", "with the keys"])
def test_every_object_of_an_encrypted_bucket_is_verified_as_it_lies_there(coding: str, bucket: LocalBucket) -> None:
    url = bucket.new_url()
    fill(open_storage(url + CODED), LAYOUT, PROMPTS)
    for verb in ("verify", "scrub"):
        (found,) = json.loads(ask("storage", verb, url + coding, "--json").out)["identities"]
        assert (found["sound"], found["gone"], found["findings"]) == (found["objects"], 0, [])
    assert restored_pages(open_storage(url + CODED), LAYOUT, PROMPTS[0]) == PAGES
