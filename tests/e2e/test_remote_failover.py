"""Servers killed while they transfer: retries or misses, never wrong bytes."""

import random
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.budget import examples
from tests.support.cluster import ServeProcess
from tests.support.running_service import read_metrics
from tests.support.service import wait_for
from unified_cache.components import Full
from unified_cache.core.errors import StorageError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.settings.service import Role
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.tokens import add_token, new_token, remove_token
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import blank_page, bytes_of, sealed_page

PAYLOAD_BYTES = 300_000
"""Several reads of a socket, so that a kill lands inside pages."""
OBJECT_BYTES = HEADER_BYTES + PAYLOAD_BYTES
PAGES = 48
TIMEOUT_S = 5.0
"""Of a call; a put and a get that take longer together than two of these have not ended in time."""
KILLS = examples(2, 8)
"""Each of two servers is killed once, or four times."""
LAYOUT = ModelLayout(16, (Full((PoolSpec("kv", PAYLOAD_BYTES),)),))
MANIFEST = manifest_of(Identity("failing/over"), LAYOUT)


def label(number: int) -> Label:
    return Label(MANIFEST.identity, random.Random(number).randbytes(32), "kv")


def pages_of(numbers: range) -> list[PageIO]:
    return [sealed_page(label(number), OBJECT_BYTES) for number in numbers]


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServeProcess]]:
    """Two servers over one directory."""
    servers = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        servers.append(ServeProcess(variables={"STORAGE": f"file:{tmp_path / 'store'}"}))
    yield servers
    for server in servers:
        server.kill()


def client(servers: list[ServeProcess]) -> VerifiedStorage:
    storage = VerifiedStorage(
        RemoteStorage.open(RemoteOptions(tuple(server.address for server in servers), timeout_s=TIMEOUT_S))
    )
    storage.register(MANIFEST, {})
    return storage


def blank(pages: list[PageIO]) -> list[PageIO]:
    """Return pages of the same labels, to be filled."""
    return [blank_page(page.label, OBJECT_BYTES) for page in pages]


def all_come(storage: VerifiedStorage, found: list[PageIO]) -> bool:
    """Fill pages; tell whether all have come."""
    with suppress(StorageError):
        return all(storage.get(found))
    return False


@pytest.mark.parametrize("has_standby", [True, False])
def test_servers_killed_while_they_transfer_cost_retries_or_misses_and_never_wrong_bytes(
    has_standby: bool, servers: list[ServeProcess]
) -> None:
    used = servers if has_standby else servers[:1]
    storage = client(used)
    pages = pages_of(range(PAGES))
    expected = [bytes_of(page) for page in pages]
    assert all(storage.put(pages, Level.DURABLE))
    ended = threading.Event()

    def read(seed: int) -> int:
        choice = random.Random(seed)
        hits_count = 0
        while not ended.is_set():
            numbers = choice.sample(range(PAGES), 12)
            found = [blank_page(label(number), OBJECT_BYTES) for number in numbers]
            fresh = [sealed_page(label(choice.randrange(PAGES, 2 * PAGES)), OBJECT_BYTES)]
            began_s = time.monotonic()
            try:
                storage.put(fresh, Level.CACHED)
                hits = storage.get(found)
            except StorageError:
                continue
            finally:
                assert time.monotonic() - began_s < 2 * TIMEOUT_S
            hits_count += hits.count(Answer.HIT)
            for number, page, hit in zip(numbers, found, hits, strict=True):
                assert not hit or bytes_of(page) == expected[number]
        return hits_count

    with ThreadPoolExecutor(3) as readers:
        reading = [readers.submit(read, seed) for seed in range(3)]
        try:
            for cycle in range(KILLS):
                victim = used[cycle % len(used)]
                threading.Event().wait(0.15)
                victim.kill()
                if not has_standby:
                    victim.start()
                wait_for(partial(all_come, storage, blank(pages[:8])))  # from the other server, if there is one
                if has_standby:
                    victim.start()
        finally:
            ended.set()
        assert all(each.result() > 0 for each in reading)
    found = blank(pages)
    wait_for(partial(all_come, storage, found))
    assert [bytes_of(page) for page in found] == expected
    written = pages_of(range(PAGES, 2 * PAGES))
    found = blank(written)
    for page, read_back, hit in zip(written, found, storage.get(found), strict=True):
        assert not hit or bytes_of(read_back) == bytes_of(page)
    assert storage.flaws_count == {}
    storage.close()


def test_what_one_process_stored_another_finds_whatever_its_hash_seed(servers: list[ServeProcess]) -> None:
    first, second = client(servers[:1]), client(servers[1:])
    pages = pages_of(range(4))
    assert all(first.put(pages, Level.CACHED))
    found = [blank_page(page.label, OBJECT_BYTES) for page in pages]
    assert all(second.get(found))
    assert [bytes_of(page) for page in found] == [bytes_of(page) for page in pages]
    first.close()
    second.close()


def test_each_of_two_servers_over_one_store_keeps_a_quota_for_its_pages_and_one_that_starts_for_all(
    tmp_path: Path,
) -> None:
    quota_pages = 16
    quota_bytes = quota_pages * (OBJECT_BYTES + 8192)
    variables = {"STORAGE": f"file:{tmp_path / 'store'}", "QUOTA__STORED_BYTES_MAX": str(quota_bytes)}
    with ExitStack() as ends:
        servers = [ends.enter_context(ServeProcess(variables=variables)) for _ in range(2)]
        storage = ends.enter_context(closing(client(servers)))
        pages = pages_of(range(6 * quota_pages))
        labels = [page.label for page in pages]
        for start in range(0, len(pages), 4):
            assert all(storage.put(pages[start : start + 4], Level.CACHED))
        counted = [stored_bytes(server) for server in servers]
        assert max(counted) <= quota_bytes, "each keeps the quota"
        left = list(map(bool, storage.exists(labels)))
        assert quota_pages < sum(left) <= 2 * quota_pages, "and knows of its own pages alone"
        assert all(left[-4:]), "the oldest went"

        servers[0].kill()
        servers[0].start()
        wait_for(lambda: sum(map(bool, storage.exists(labels))) <= quota_pages)
        assert quota_bytes // 2 < stored_bytes(servers[0]) <= quota_bytes
        assert all(storage.exists(labels[-4:])), "the oldest went"


def stored_bytes(server: ServeProcess) -> float:
    """Return what a server counts for the only tenant."""
    found = read_metrics(server.metrics_port).items()
    (counted,) = (value for name, value in found if name.startswith("unified_cache_service_stored_bytes{"))
    return counted


def test_a_token_that_is_revoked_is_refused_by_every_server_within_a_second_or_so(tmp_path: Path) -> None:
    tokens, shown = tmp_path / "tokens", tmp_path / "token"
    token, entry = new_token(Caller("acme", Role.READER), None, secrets.token_bytes)
    add_token(tokens, entry)
    shown.write_text(token, encoding="utf-8")
    variables = {"STORAGE": f"file:{tmp_path / 'store'}", "ACCESS__TOKENS": str(tokens), "AUDIT__FILE": ""}
    with ExitStack() as ends:
        clients = []
        for number in range(2):
            variables["AUDIT__FILE"] = str(tmp_path / f"log-{number}")
            server = ends.enter_context(ServeProcess(variables=variables))
            client = open_storage(f"grpc://{server.address}?token_file={shown}")
            clients.append(ends.enter_context(closing(client)))
        for each in clients:
            each.manifests()
        remove_token(tokens, entry.token_id)

        def is_refused(client: Store) -> bool:
            with suppress(StorageError):
                client.manifests()
                return False
            return True

        wait_for(lambda: all(list(map(is_refused, clients))), timeout_s=2.0)
