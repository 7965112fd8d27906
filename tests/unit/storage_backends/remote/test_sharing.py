"""Clients that share memory: with whom they do, and what they do instead where they cannot."""

import errno
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority
from tests.support.clock import ManualClock
from tests.support.running_service import called, credentials, refusal
from tests.support.running_service import running as serving
from tests.support.service import LoopbackServer, limits_with, wait_for
from tests.unit.service.test_requests import MANIFEST, OBJECT_BYTES, key, page
from tests.unit.service.test_sharing import mapped_count, offered
from unified_cache.proto import service_pb2 as pb
from unified_cache.seal import Label
from unified_cache.settings.limits import LimitSettings
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.remote.server import Server
from unified_cache.storage_backends.remote.sharing import REGION_BYTES_MIN, RegionGrant, RegionSharing
from unified_cache.storage_backends.remote.store import RemoteStorage, open_secure_url
from unified_cache.wire.calls import Call
from unified_cache.wire.sharing import RegionOffer, RegionTie


@pytest.fixture
def running() -> Iterator[LoopbackServer]:
    running = LoopbackServer.start(MemoryStorage())
    yield running
    running.stop()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> dict[str, str]:
    certificate, key_file = authority.issue("server").write(tmp_path, "server")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.pem)
    return {"certificate": str(certificate), "key": str(key_file), "client_ca": str(ca)}


def pages_of(*numbers: int, blank: bool = False) -> list[PageIO]:
    def content(number: int) -> memoryview:
        return memoryview(bytearray(OBJECT_BYTES if blank else page(number)))

    return [PageIO(Label(MANIFEST.identity, key(number), "kv"), None, (content(number),)) for number in numbers]


def come_and_go(storage: RemoteStorage) -> None:
    """Put pages and get them back."""
    storage.register(MANIFEST, {})
    assert storage.put(pages_of(1, 2), Level.CACHED) == [Answer.STORED, Answer.STORED]
    found = pages_of(1, 9, 2, blank=True)
    assert storage.get(found) == [Answer.HIT, Answer.MISS, Answer.HIT]
    assert [bytes(found[number].buffers[0]) for number in (0, 2)] == [page(1), page(2)]


def test_a_client_shares_by_itself_and_lets_go_when_it_is_closed(running: LoopbackServer) -> None:
    before = mapped_count()
    storage = running.client()
    come_and_go(storage)
    assert running.service._regions.count("default") == 1
    assert mapped_count() == before + 2  # this process is both ends
    storage.close()
    assert running.service._regions.count("default") == 0
    assert mapped_count() == before


def test_a_client_whose_memory_the_server_forgot_goes_on(running: LoopbackServer) -> None:
    storage = running.client()
    storage.register(MANIFEST, {})
    storage.put(pages_of(1), Level.CACHED)
    running.service._regions.close()
    assert storage.put(pages_of(2), Level.CACHED) == [Answer.STORED]
    assert storage.get(pages_of(1, 2, blank=True)) == [Answer.HIT, Answer.HIT]
    storage.close()


def test_a_client_that_is_refused_uses_the_stream() -> None:
    running = LoopbackServer.start(MemoryStorage(), limits_with(region_bytes_max=16 << 20))
    taken = [running.client() for _ in range(LimitSettings().regions_max + 1)]
    for number, storage in enumerate(taken):
        storage.register(MANIFEST, {})
        assert storage.put(pages_of(number), Level.CACHED) == [Answer.STORED]
        assert storage.get(pages_of(number, blank=True)) == [Answer.HIT]
    assert running.service._regions.count("default") == LimitSettings().regions_max
    for storage in taken:
        storage.close()
    running.stop()


def tied_grant(offer: RegionOffer, timeout_s: float) -> RegionGrant:
    """Take up an offer as a server does that never uses it."""
    here, _there = socket.socketpair()
    _there.close()
    return RegionGrant("region", 60.0, RegionTie(here))


def leave_room(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """Let the machine have no more memory, but for this."""
    allocate = os.posix_fallocate

    def allocated(descriptor: int, offset: int, length: int) -> None:
        if length > room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocated)


@pytest.mark.parametrize(("room_bytes", "regions_count"), [(REGION_BYTES_MIN - 1, 0), (REGION_BYTES_MIN, 1)])
def test_where_shared_memory_is_full_a_client_shares_less_or_uses_the_stream(
    running: LoopbackServer, monkeypatch: pytest.MonkeyPatch, room_bytes: int, regions_count: int
) -> None:
    leave_room(monkeypatch, room_bytes)
    storage = running.client()
    come_and_go(storage)
    assert running.service._regions.count("default") == regions_count
    storage.close()


def test_a_call_that_a_small_region_has_no_room_for_uses_the_stream_and_others_go_on_sharing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_room(monkeypatch, REGION_BYTES_MIN)
    sharing = RegionSharing(tied_grant, ManualClock(1000.0))
    assert sharing.lend(REGION_BYTES_MIN, 1 << 30, 1.0) is None
    first = sharing.lend(REGION_BYTES_MIN // 2, 1 << 30, 1.0)
    assert first is not None
    assert sharing.lend(REGION_BYTES_MIN // 2, 1 << 30, 1.0) is None
    with sharing.over(first):
        pass
    assert sharing.lend(REGION_BYTES_MIN // 2, 1 << 30, 1.0) is not None
    sharing.give_up()


def test_a_client_of_this_machine_shares_memory_over_tls_too(
    authority: Authority, tls: dict[str, str], tmp_path: Path
) -> None:
    certificate, key_file = authority.issue("acme/writer").write(tmp_path, "acme")
    with serving(tls=tls) as server:
        before = mapped_count()
        query = f"ca_file={tls['client_ca']}&cert_file={certificate}&key_file={key_file}"
        storage = open_secure_url(f"//{server.address}?{query}", None)
        come_and_go(storage)
        assert mapped_count() == before + 2
        storage.close()
        wait_for(lambda: mapped_count() == before)


def test_a_region_belongs_to_the_tenant_of_the_certificate_that_it_was_offered_with(
    authority: Authority, tls: dict[str, str]
) -> None:
    with (
        offered() as memory,
        serving(tls=tls) as server,
        grpc.secure_channel(server.address, credentials(authority, authority.issue("acme/writer"))) as own,
        grpc.secure_channel(server.address, credentials(authority, authority.issue("other/writer"))) as foreign,
    ):
        name = memory.shared(partial(called, own, Call.SHARE))
        unshare = pb.UnshareRequest(region=name)
        assert refusal(foreign, Call.UNSHARE, unshare) == (grpc.StatusCode.NOT_FOUND, "no such region")
        assert refusal(own, Call.UNSHARE, unshare) is None


@pytest.mark.parametrize("begun_by", ["receive", "send"])
def test_a_call_that_is_interrupted_as_it_begins_leaves_no_window_behind(
    running: LoopbackServer, begun_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = running.client()
    come_and_go(storage)
    sharing = storage._servers[0]._sharing
    assert sharing is not None
    opened = sharing._open
    assert opened is not None

    def interrupted(*arguments: object, **named: object) -> None:
        assert len(opened.lent) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, begun_by, interrupted)
    with pytest.raises(KeyboardInterrupt):
        come_and_go(storage)
    assert opened.lent == []
    assert sharing._open is None, "the server may be at it still"
    storage.close()


def test_a_server_that_grants_what_it_never_came_for_shares_nothing() -> None:
    sharing = RegionSharing(lambda offer, timeout_s: None, ManualClock(1000.0))
    assert sharing.lend(1, REGION_BYTES_MIN, 1.0) is None
