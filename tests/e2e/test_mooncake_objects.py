"""Single objects in a cluster that is full, forgets, is written to by others, or is not there."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.sources import ROOT
from tests.support.mooncake import LocalCluster, MasterSettings, open_mooncake
from tests.support.mooncake_needed import needs_mooncake
from tests.support.waiting import wait_until
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Flaw
from unified_cache.storage_backends.mooncake.client import AGED_OBJECTS, ObjectBuffers, pointer_to
from unified_cache.storage_backends.mooncake.native import ResultCode
from unified_cache.storage_backends.mooncake.store import MooncakeStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import (
    POOLS,
    blank_page,
    bytes_of,
    label,
    open_for_contract,
    sealed_page,
)

pytestmark = needs_mooncake

MIB = 1 << 20
SEGMENT_MIB = 16
RECOVERY_S = 10.0

WRITER = """
import sys
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import label, open_for_contract, sealed_page

storage = open_for_contract(open_storage(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
storage.put([sealed_page(label(1), 1 << 20)], Level.CACHED)
"""

FOREIGNER = """
import ctypes, os, sys
from mooncake.store import MooncakeDistributedStore

master, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
page = ctypes.create_string_buffer(os.urandom(size), size)
store.register_buffer(ctypes.addressof(page), size)
assert store.batch_upsert_from([key], [ctypes.addressof(page)], [size]) == [0]
os._exit(0)
"""


@contextmanager
def child_running(program: str, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a program with pipes; it is killed in the end."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    with LocalCluster.running() as cluster:
        yield cluster


@pytest.fixture
def storage(shared: LocalCluster) -> Iterator[MooncakeStorage]:
    with closing(open_mooncake(shared)) as storage:
        open_for_contract(storage)
        yield storage


def reads(storage: VerifiedStorage, number: int, page_bytes: int) -> bool:
    """Tell whether a page can be read; if so, it must be the right one."""
    found = blank_page(label(number), page_bytes)
    (hit,) = storage.get([found])
    assert not hit or bytes_of(found) == bytes_of(sealed_page(label(number), page_bytes))
    return bool(hit)


def test_a_full_cluster_declines_what_has_no_room_keeps_what_it_took_and_takes_more_later() -> None:
    with LocalCluster.running(segment_bytes=SEGMENT_MIB << 20) as cluster, closing(open_mooncake(cluster)) as inner:
        storage = VerifiedStorage(inner)
        open_for_contract(storage)
        assert storage.capability().bytes_max == SEGMENT_MIB << 20
        stored = storage.put([sealed_page(label(n), MIB) for n in range(2 * SEGMENT_MIB)], Level.CACHED)
        assert SEGMENT_MIB // 2 <= stored.count(Answer.STORED) < SEGMENT_MIB
        assert all(reads(storage, number, MIB) for number, taken in enumerate(stored) if taken)
        # One that was declined at once, or taken and evicted for a later one: the cluster says of the second only that
        # it is not there.
        again = sealed_page(label(next(number for number, taken in enumerate(stored) if not taken)), MIB)
        assert wait_until(lambda: storage.put([again], Level.CACHED) == [Answer.STORED], RECOVERY_S)
        assert storage.flaws_count == {}


def test_a_page_that_is_evicted_between_exists_and_get_is_a_miss() -> None:
    settings = MasterSettings(lease_ms=100)
    with LocalCluster.running(1, SEGMENT_MIB << 20, settings) as cluster, closing(open_mooncake(cluster)) as inner:
        storage = VerifiedStorage(inner)
        open_for_contract(storage)
        storage.put([sealed_page(label(0), MIB)], Level.CACHED)
        assert storage.exists([label(0)]) == [Answer.HIT]
        name, admin = label(0).object_name, cluster.admin
        others = iter(range(1, 1000))

        def is_evicted() -> bool:
            inner.put([sealed_page(label(next(others)), MIB) for _ in range(4)], Level.CACHED)
            return not admin.keys(lambda key: key == name)  # listing leases nothing

        assert wait_until(is_evicted, RECOVERY_S)
        assert not reads(storage, 0, MIB)
        assert storage.put([sealed_page(label(0), MIB)], Level.CACHED) == [Answer.STORED]
        assert reads(storage, 0, MIB)


def test_pages_whose_lease_runs_out_while_they_are_read_are_read_again() -> None:
    settings = MasterSettings(lease_ms=100)
    with LocalCluster.running(1, settings=settings) as cluster, closing(open_mooncake(cluster)) as inner:
        storage = VerifiedStorage(inner)
        open_for_contract(storage)
        assert all(storage.put([sealed_page(label(n), MIB // 4) for n in range(8)], Level.CACHED))
        cluster.nodes[0].stop()
        threading.Timer(0.4, cluster.nodes[0].cont).start()
        assert all(storage.get([blank_page(label(number), MIB // 4) for number in range(8)]))
        assert storage.flaws_count == {}


def test_a_page_whose_writer_was_killed_is_unavailable_and_taken_once_the_reservation_is_discarded() -> None:
    with LocalCluster.running() as cluster, closing(open_mooncake(cluster)) as inner:
        storage = VerifiedStorage(inner)
        open_for_contract(storage)
        # The writer waits long for the node that stalls, so that it is killed with its page half-written.
        with child_running(WRITER, cluster.url, MC_TCP_STATUS_TIMEOUT_SEC="60") as writer:
            assert writer.stdout is not None
            assert writer.stdin is not None
            assert writer.stdout.readline() == "ready\n"
            cluster.nodes[0].stop()
            writer.stdin.write("\n")
            writer.stdin.flush()
            (buffer,) = blank_page(label(1), MIB).buffers
            ask = inner._client.getting([ObjectBuffers(0, label(1).object_name, MIB, [pointer_to(buffer)], [MIB])])
            assert wait_until(lambda: ask() == [ResultCode.NOT_READY], RECOVERY_S)
        cluster.nodes[0].cont()
        assert not reads(storage, 1, MIB)
        assert storage.put([sealed_page(label(1), MIB)], Level.CACHED) == [Answer.UNAVAILABLE]
        assert wait_until(
            lambda: storage.put([sealed_page(label(1), MIB)], Level.CACHED) == [Answer.STORED], RECOVERY_S
        )
        assert reads(storage, 1, MIB)


@pytest.mark.parametrize("foreign_bytes", [MIB, MIB - 1, MIB + 1, 100])
def test_a_page_that_a_foreign_client_overwrote_is_a_miss_and_can_be_put_again(
    foreign_bytes: int, shared: LocalCluster, storage: MooncakeStorage
) -> None:
    verified = VerifiedStorage(storage)
    page = sealed_page(label(2), MIB)
    assert verified.put([page], Level.CACHED) == [Answer.STORED]
    command = [sys.executable, "-c", FOREIGNER, shared.address.master, page.label.object_name, str(foreign_bytes)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=30, stderr=subprocess.DEVNULL)
    assert not reads(verified, 2, MIB)
    assert verified.flaws_count == ({Flaw.HEADER: 1} if foreign_bytes == MIB else {})
    assert verified.put([page], Level.CACHED) == [Answer.STORED]
    assert reads(verified, 2, MIB)


def test_a_page_of_another_size_is_replaced_by_a_put_without_a_get_before(storage: MooncakeStorage) -> None:
    assert storage.put([sealed_page(label(3), 1000)], Level.CACHED) == [Answer.STORED]
    assert storage.put([sealed_page(label(3), 2000)], Level.CACHED) == [Answer.STORED]
    assert reads(VerifiedStorage(storage), 3, 2000)


def test_a_manifest_that_is_gone_is_put_again_with_the_next_page(storage: MooncakeStorage) -> None:
    identity = label(4).identity
    kept = storage.manifests()[identity]
    assert kept is not None
    storage._client.remove([f"{identity.hex()}/manifest.json"])
    assert storage.manifests().get(identity) is None
    assert storage.put([sealed_page(label(4))], Level.CACHED) == [Answer.STORED]
    assert storage.manifests()[identity] == kept


def test_no_master_is_an_error_at_once_and_the_process_goes_on_meanwhile() -> None:
    with LocalCluster.running() as cluster:
        url = cluster.url
        cluster.master.stop()
        started_s = time.monotonic()
        with pytest.raises(StorageError, match="does not answer"):
            open_storage(url)
    with pytest.raises(StorageError, match="no Mooncake master answers"):
        open_storage(url)
    assert time.monotonic() - started_s < 5


def test_two_stores_of_one_process_share_a_client_and_close_by_themselves(shared: LocalCluster) -> None:
    first, second = open_mooncake(shared), open_mooncake(shared)
    assert first._client is second._client
    open_for_contract(first)
    open_for_contract(second)
    first.close()
    assert second.put([sealed_page(label(5))], Level.CACHED) == [Answer.STORED]
    second.close()


def test_under_pressure_a_prefix_goes_from_its_tail_and_all_objects_of_a_page_together() -> None:
    settings = MasterSettings(lease_ms=100)
    with (
        LocalCluster.running(1, 2 * SEGMENT_MIB << 20, settings) as cluster,
        closing(open_mooncake(cluster)) as storage,
    ):
        open_for_contract(storage)
        chain = [label(number) for number in range(40)]
        sizes = {POOLS[0]: MIB // 4, POOLS[1]: 4096}
        pages = [sealed_page(named._replace(pool=pool), sizes[pool]) for pool in sizes for named in chain]
        assert all(storage.put(pages, Level.CACHED))
        admin = cluster.admin
        others = iter(range(1000, 2000))

        def some_are_gone() -> bool:
            storage.put([sealed_page(label(next(others)), MIB // 4)], Level.CACHED)
            keys = set(admin.keys(lambda key: True))  # listing leases nothing
            left.clear()
            left.update({pool: [named._replace(pool=pool).object_name in keys for named in chain] for pool in sizes})
            return sum(left[POOLS[0]]) < len(chain)

        left: dict[str, list[bool]] = {}
        assert wait_until(some_are_gone, RECOVERY_S)
        held = left[POOLS[0]]
        assert left[POOLS[1]] == held
        prefix = (*held, False).index(False)
        assert sum(held) - prefix < AGED_OBJECTS, held
