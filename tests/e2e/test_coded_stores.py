"""Compressed and encrypted stores from everywhere that takes the URL of a store, without an engine's own packages."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster import ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill, restored_pages
from tests.support.running_service import running
from tests.unit.storage_backends.wrappers.test_coded import bf16_like, blank_like, page_of, read_back
from unified_cache.components import Full
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import Label
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.url import open_storage
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


@pytest.mark.parametrize("kind", ["file", "packed"])
def test_an_embedded_cache_restores_its_prompts_from_an_encrypted_store(kind: str, tmp_path: Path) -> None:
    url = f"{kind}:{tmp_path / 'store'}"
    fill(open_storage(url + CODED), LAYOUT, PROMPTS)
    assert [restored_pages(open_storage(url + CODED), LAYOUT, prompt) for prompt in PROMPTS] == [PAGES, PAGES]
    assert restored_pages(open_storage(url), LAYOUT, PROMPTS[0]) == 0
    assert restored_pages(open_storage(url + CODED), LAYOUT, PROMPTS[0]) == PAGES, "a reader without keys removes none"


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
                assert server.metrics()['unified_cache_service_undecoded_pages_total{reason="unencrypted"}'] == 1
    *sizes, forged_bytes = sorted(path.stat().st_size for path in store.rglob("*.kv"))
    assert max(sizes) < 0.75 * forged_bytes


def test_the_settings_of_a_service_are_shown_without_a_key(tmp_path: Path) -> None:
    said = ask("serve", "--storage", f"file:{tmp_path}{CODED}", "--print-config")
    assert said.status == 0
    assert "keys=env:PAGE_KEYS" in said.out
    assert "3d3d" not in said.out + said.err
