"""One field of an identity different: nothing is found, in the memory of a server or in the store behind it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.service import LoopbackServer
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.shards import Extent, Shard, TokenRuns
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.testing.storage_contract import blank_page, bytes_of, sealed_page

PAYLOAD_BYTES = 500
KV = PoolSpec("kv", PAYLOAD_BYTES)
LAYOUT = ModelLayout(4, (Full((KV,)), SlidingWindow(8, 4, (PoolSpec("swa", PAYLOAD_BYTES),))))
SHARD = Shard(Extent(0, 4, 8), Extent(0, 16, 32))
IDENTITY = Identity("model", "r1", "bf16", SHARD)
TOKENS = tuple(range(16))


class IdentityProbe:
    """Identity of the pages that a client asks for."""

    def __init__(self, running: LoopbackServer) -> None:
        self.running = running

    def hits(
        self,
        identity: Identity = IDENTITY,
        layout: ModelLayout = LAYOUT,
        namespace: Namespace | None = None,
        tokens: tuple[int, ...] = TOKENS,
        tenant: str = "tenant",
        put: bool = False,
    ) -> int:
        """Get, or put first, every page of a prompt; return how many of Full's came."""
        storage = RemoteStorage.open(RemoteOptions((self.running.address,), token=f"{tenant}:writer"))
        keys = Prompt.of(tokens, layout.page_size, namespace or Namespace(extra_key="extra", cache_salt="salt")).keys
        pool = layout.components[0].pools[0]
        labels = [Label(identity.digest(layout), key, pool.name) for key in keys]
        object_bytes = HEADER_BYTES + pool.page_bytes
        try:
            storage.register(manifest_of(identity, layout), {})
            if put:
                assert all(storage.put([sealed_page(label, object_bytes) for label in labels], Level.CACHED))
            found = [blank_page(label, object_bytes) for label in labels]
            hits = storage.get(found)
            for page, label, hit in zip(found, labels, hits, strict=True):
                assert not hit or bytes_of(page) == bytes_of(sealed_page(label, object_bytes))
            return hits.count(Answer.HIT)
        finally:
            storage.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[IdentityProbe]:
    running = LoopbackServer.start(FileStorage.open(tmp_path / "store"))
    world = IdentityProbe(running)
    assert world.hits(put=True) == 4
    yield world
    running.stop()


WINDOW = LAYOUT.components[1]
FLIPPED: dict[str, Callable[[IdentityProbe], int]] = {
    "model": lambda world: world.hits(replace(IDENTITY, model="other")),
    "revision": lambda world: world.hits(replace(IDENTITY, revision="r2")),
    "dtype": lambda world: world.hits(replace(IDENTITY, dtype="fp8")),
    "heads of the shard": lambda world: world.hits(replace(IDENTITY, shard=replace(SHARD, heads=Extent(4, 8, 8)))),
    "layers of the shard": lambda world: world.hits(replace(IDENTITY, shard=replace(SHARD, layers=Extent(16, 32, 32)))),
    "tokens of the shard": lambda world: world.hits(replace(IDENTITY, shard=replace(SHARD, tokens=TokenRuns(0, 2)))),
    "page size": lambda world: world.hits(
        layout=ModelLayout(8, (Full((KV,)), SlidingWindow(16, 8, (PoolSpec("swa", PAYLOAD_BYTES),))))
    ),
    "components": lambda world: world.hits(layout=ModelLayout(4, (Full((KV,)),))),
    "kind of component": lambda world: world.hits(
        layout=ModelLayout(4, (Full((KV,)), RecurrentState((PoolSpec("swa", PAYLOAD_BYTES),))))
    ),
    "window": lambda world: world.hits(
        layout=ModelLayout(4, (Full((KV,)), SlidingWindow(12, 4, (PoolSpec("swa", PAYLOAD_BYTES),))))
    ),
    "pools": lambda world: world.hits(layout=ModelLayout(4, (Full((KV, PoolSpec("index", 9))), WINDOW))),
    "page bytes": lambda world: world.hits(layout=ModelLayout(4, (Full((PoolSpec("kv", PAYLOAD_BYTES + 1),)), WINDOW))),
    "extra key": lambda world: world.hits(namespace=Namespace(extra_key="other", cache_salt="salt")),
    "salt": lambda world: world.hits(namespace=Namespace(extra_key="extra", cache_salt="other")),
    "adapter": lambda world: world.hits(namespace=Namespace(extra_key="extra", cache_salt="salt", lora_id="adapter")),
    "tenant": lambda world: world.hits(tenant="other"),
    "tokens": lambda world: world.hits(tokens=(99, *TOKENS[1:])),
}


@pytest.mark.parametrize("field", FLIPPED)
def test_one_field_different_finds_nothing_and_takes_nothing_away(world: IdentityProbe, field: str) -> None:
    assert FLIPPED[field](world) == 0
    assert world.hits() == 4


def test_nothing_different_finds_everything(world: IdentityProbe) -> None:
    assert world.hits(replace(IDENTITY), ModelLayout(4, LAYOUT.components)) == 4
