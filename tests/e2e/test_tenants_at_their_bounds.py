"""``unified-cache serve`` with tenants at their quotas: the newest prompts are whole, and a restart counts the rest."""

import hashlib
from pathlib import Path

import pytest

from tests.support.cluster import ServeProcess
from tests.support.running_service import CALL_S, read_metrics
from tests.support.service import wait_for
from unified_cache.components import Full
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.testing.storage_contract import listing, sealed_page

PROMPTS, PROMPT_PAGES = 240, 8
OBJECT_BYTES = 8 << 10
QUOTA_BYTES = 8 << 20
NEWEST = 20
LAYOUT = ModelLayout(16, (Full((PoolSpec("kv", OBJECT_BYTES - HEADER_BYTES),)),))
MANIFEST = manifest_of(Identity("at/bounds"), LAYOUT)


def labels(prompt: int) -> list[Label]:
    digests = [hashlib.sha256(b"%d %d" % (prompt, number)).digest() for number in range(PROMPT_PAGES)]
    return [Label(MANIFEST.identity, digest, "kv") for digest in digests]


def put_prompts(client: RemoteStorage, prompts: range) -> None:
    for prompt in prompts:
        assert all(client.put([sealed_page(label, OBJECT_BYTES) for label in labels(prompt)], Level.CACHED))


def whole_count(client: RemoteStorage, prompts: range) -> int:
    return sum(all(client.exists(labels(prompt))) for prompt in prompts)


def listed_bytes(client: RemoteStorage) -> int:
    return sum(found.object_bytes for found in listing(client, MANIFEST.identity))


def figure(server: ServeProcess, name: str) -> float:
    found = read_metrics(server.metrics_port).items()
    return sum(value for series, value in found if series.startswith(f"unified_cache_service_{name}"))


def connected(server: ServeProcess) -> RemoteStorage:
    client = RemoteStorage.open(RemoteOptions((server.address,)))
    client.register(MANIFEST, {})
    wait_for(lambda: figure(server, "uncounted") == 0, CALL_S)
    return client


@pytest.mark.threat("filling the store")
@pytest.mark.parametrize("kind", ["memory", "file", "packed"])
def test_a_tenant_at_its_quota_has_its_newest_prompts_also_after_a_restart(kind: str, tmp_path: Path) -> None:
    url = "memory:" if kind == "memory" else f"{kind}:{tmp_path / 'kv'}"
    variables = {"STORAGE": url, "QUOTA__STORED_BYTES_MAX": str(QUOTA_BYTES)}
    with ServeProcess(variables=variables) as server:
        client = connected(server)
        put_prompts(client, range(PROMPTS))
        assert whole_count(client, range(PROMPTS - NEWEST, PROMPTS)) == NEWEST
        kept_count = listed_bytes(client) // OBJECT_BYTES
        assert kept_count == PROMPTS * PROMPT_PAGES - figure(server, "outgrown_pages_total{")
        assert 0.95 * QUOTA_BYTES < figure(server, "stored_bytes{") <= QUOTA_BYTES
        stored_bytes = figure(server, "stored_bytes{")
        client.close()
        if kind == "memory":
            return
        server.kill()
        server.start()
        client = connected(server)
        assert figure(server, "stored_bytes{") == stored_bytes
        put_prompts(client, range(1000, 1000 + NEWEST))
        assert listed_bytes(client) // OBJECT_BYTES == kept_count
        newest = [range(1000, 1000 + NEWEST), range(PROMPTS - NEWEST, PROMPTS)]
        assert [whole_count(client, prompts) for prompts in newest] == [NEWEST, NEWEST]
        client.close()
