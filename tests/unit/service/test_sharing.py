"""Pages through shared memory: used where it can be, refused where it is not what it says, never believed twice."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.support.clock import ManualClock
from tests.support.service import LoopbackServer, Wire, limits_with, refused, wait_for
from tests.unit.service.test_requests import BAD, MANIFEST, OBJECT_BYTES, key, page, part, run, start
from unified_cache.proto import service_pb2 as pb
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.wire.calls import Call
from unified_cache.wire.sharing import (
    ABANDONED_S,
    NAME_PREFIX,
    PROOF_BYTES,
    SHARED_DIRECTORY,
    SharedRegion,
    is_local_peer,
    named_here,
    remove_abandoned_files,
)

LIMITS = limits_with(regions_max=3, region_bytes_max=1 << 20, region_idle_s=60.0)
REGION_BYTES = 64 << 10
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
PROOF = bytes(range(PROOF_BYTES))
BUFFERS = 2500
"""More than the system takes at a time."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def running(clock: ManualClock) -> Iterator[LoopbackServer]:
    running = LoopbackServer.start(MemoryStorage(), LIMITS, clock=clock)
    yield running
    running.stop()


@pytest.fixture
def wire(running: LoopbackServer) -> Iterator[Wire]:
    wire = Wire(running)
    wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
    yield wire
    wire.close()


@pytest.fixture
def path() -> Iterator[Path]:
    path = SHARED_DIRECTORY / (NAME_PREFIX + secrets.token_hex(16))
    yield path
    if path.is_symlink() or path.exists():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def made(path: Path) -> SharedRegion:
    return SharedRegion.create(path.parent, path.name, REGION_BYTES, PROOF)


def offer(path: Path, region_bytes: int = REGION_BYTES, proof: bytes = PROOF) -> pb.ShareRequest:
    return pb.ShareRequest(name=path.name, region_bytes=region_bytes, proof=proof)


def shared(wire: Wire, path: Path) -> str:
    return pb.ShareReply.FromString(wire.ask(Call.SHARE, offer(path))).region


def range_of(region: str, length: int = 3 * OBJECT_BYTES, start: int = 0) -> pb.SharedRange:
    return pb.SharedRange(region=region, start=start, length=length)


def shared_start(where: pb.SharedRange, *numbers: int) -> pb.PutPart:
    message = start(*numbers)
    message.start.shared.CopyFrom(where)
    return message


def put(wire: Wire, region: SharedRegion, name: str, number: int, at: int = 0) -> bytes:
    region.write((memoryview(page(number)),), at)
    messages = [shared_start(range_of(name, start=at), number), pb.PutPart(shared_bytes=OBJECT_BYTES)]
    return pb.PutReply.FromString(wire.put(messages)).stored


def get(wire: Wire, where: pb.SharedRange, *numbers: int) -> tuple[bytes, int]:
    request = pb.GetRequest(runs=[run(*map(key, numbers), object_bytes=OBJECT_BYTES)], shared=where)
    parts = [pb.GetPart.FromString(message) for message in wire.get(request)]
    assert not any(answer.content for answer in parts)
    return b"".join(answer.hits for answer in parts), sum(answer.shared_bytes for answer in parts)


def bytes_in(region: SharedRegion, at: int, count: int) -> bytes:
    found = memoryview(bytearray(count))
    region.read_into((found,), at)
    return bytes(found)


def test_pages_go_both_ways_through_a_file_that_has_no_name_any_more(wire: Wire, path: Path) -> None:
    region = made(path)
    name = shared(wire, path)
    assert not path.exists()
    assert put(wire, region, name, 1, at=4096) == b"\x02"
    assert put(wire, region, name, 2) == b"\x02"
    assert get(wire, range_of(name, start=8192), 1, 3, 2) == (b"\x01\x00\x01", 2 * OBJECT_BYTES)
    assert bytes_in(region, 8192, 2 * OBJECT_BYTES) == page(1) + page(2)


def test_a_region_moves_any_number_of_buffers_in_their_order(path: Path) -> None:
    region = made(path)
    content = os.urandom(3 * BUFFERS)
    view = memoryview(bytearray(content))
    region.write([view[3 * number : 3 * number + 3] for number in range(BUFFERS)], 7)
    found = memoryview(bytearray(3 * BUFFERS))
    region.read_into([found[:4], found[:0], *(found[at : at + 1] for at in range(4, 3 * BUFFERS))], 7)
    assert bytes(found) == content


def as_made(path: Path) -> None:
    made(path)


def readable_by_others(path: Path) -> None:
    made(path)
    path.chmod(0o644)


def of_another_user(path: Path) -> None:
    made(path)
    os.chown(path, 12345, -1)


def of_another_length(path: Path) -> None:
    made(path)
    os.truncate(path, REGION_BYTES + 1)


def without_its_proof(path: Path) -> None:
    made(path).write((memoryview(bytes(PROOF_BYTES)),), 0)


def with_a_second_name(path: Path) -> None:
    made(path)
    (path.parent / (path.name + ".other")).hardlink_to(path)


def a_link(path: Path) -> None:
    target = path.parent / (path.name + ".other")
    SharedRegion.create(path.parent, target.name, REGION_BYTES, PROOF)
    path.symlink_to(target)


def a_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def a_directory(path: Path) -> None:
    path.mkdir(0o700)


def nothing(path: Path) -> None:
    return None


@pytest.mark.parametrize(
    "make",
    [
        readable_by_others,
        pytest.param(of_another_user, marks=pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")),
        of_another_length,
        without_its_proof,
        with_a_second_name,
        a_link,
        a_fifo,
        a_directory,
        nothing,
    ],
    ids=lambda make: make.__name__,
)
def test_what_is_not_as_it_must_be_is_refused_and_left_where_it_is(
    running: LoopbackServer, wire: Wire, path: Path, make: Callable[[Path], None]
) -> None:
    make(path)
    before = path.lstat() if make is not nothing else None
    with refused(PRECONDITION):
        wire.ask(Call.SHARE, offer(path))
    assert (path.lstat() if make is not nothing else None) == before
    (path.parent / (path.name + ".other")).unlink(missing_ok=True)
    assert running.service._regions.count("default") == 0


@pytest.mark.parametrize(
    "name", ["", "x", "../etc/passwd", NAME_PREFIX, NAME_PREFIX + "A" * 32, NAME_PREFIX + "/" * 32]
)
def test_a_name_of_another_form_is_refused(wire: Wire, name: str) -> None:
    with refused(PRECONDITION):
        wire.ask(Call.SHARE, pb.ShareRequest(name=name, region_bytes=REGION_BYTES, proof=PROOF))


@pytest.mark.parametrize("region_bytes", [0, LIMITS.region_bytes_max + 1, 2**64 - 1])
def test_a_region_of_no_bytes_or_too_many_is_refused(wire: Wire, path: Path, region_bytes: int) -> None:
    made(path)
    with refused(PRECONDITION):
        wire.ask(Call.SHARE, offer(path, region_bytes))


def test_a_tenant_has_a_bounded_number_of_regions_and_others_have_theirs(running: LoopbackServer, wire: Wire) -> None:
    def offered(by: Wire) -> str:
        path = SHARED_DIRECTORY / (NAME_PREFIX + secrets.token_hex(16))
        made(path)
        try:
            return shared(by, path)
        finally:
            path.unlink(missing_ok=True)

    names = [offered(wire) for _ in range(LIMITS.regions_max)]
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        offered(wire)
    other = Wire(running, "team:writer")
    offered(other)
    other.close()
    wire.ask(Call.UNSHARE, pb.UnshareRequest(region=names[0]))
    offered(wire)


def test_a_region_that_nobody_names_is_let_go_and_calls_that_name_it_later_are_refused(
    running: LoopbackServer, wire: Wire, path: Path, clock: ManualClock
) -> None:
    # A client that died without a word leaves just this.
    before = open_files()
    region = made(path)
    name = shared(wire, path)
    put(wire, region, name, 1)
    del region
    clock.now_s += LIMITS.region_idle_s - 1
    assert get(wire, range_of(name), 1) == (b"\x01", OBJECT_BYTES)
    clock.now_s += LIMITS.region_idle_s
    running.service._regions.sweep()
    assert open_files() == before
    with refused(PRECONDITION, "no such region"):
        get(wire, range_of(name), 1)


def test_the_regions_of_a_client_that_died_are_let_go_before_they_are_idle(
    running: LoopbackServer, wire: Wire, path: Path
) -> None:
    before = open_files()
    regions = [made(path)]
    first = shared(wire, path)
    for _ in range(LIMITS.regions_max - 1):
        regions.append(made(path))
        shared(wire, path)
    running.service._regions.sweep()
    put(wire, regions[0], first, 1)
    regions.clear()
    running.service._regions.sweep()
    assert (open_files(), running.service._regions.count("default")) == (before, 0)


def test_a_client_that_died_leaves_its_place_to_the_next_one(running: LoopbackServer, wire: Wire, path: Path) -> None:
    regions: list[SharedRegion] = []
    for _ in range(LIMITS.regions_max):
        regions.append(made(path))
        shared(wire, path)
    assert running.service._regions.count("default") == LIMITS.regions_max
    regions.clear()
    next_one = made(path)
    shared(wire, path)
    assert running.service._regions.count("default") == 1
    del next_one


DIES = """
import os, secrets, signal, sys
from contextlib import suppress
from pathlib import Path
from unified_cache.wire.sharing import SharedRegion
path = Path(sys.argv[1])
region = SharedRegion.create(path.parent, path.name, 1 << 16, bytes(32))
print("made", flush=True)
signal.pause()
"""


def test_what_a_killed_client_left_is_removed_and_what_a_live_one_offers_is_not(tmp_path: Path) -> None:
    def name() -> Path:
        return tmp_path / (NAME_PREFIX + secrets.token_hex(16))

    left, offered, early, letter = name(), name(), name(), tmp_path / "letter"
    letter.touch()
    with subprocess.Popen([sys.executable, "-c", DIES, left], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"made\n"
        later_s = time.time() + 2 * ABANDONED_S
        remove_abandoned_files(tmp_path, later_s)
        assert left.exists()
        client.kill()
    region = made(offered)
    early.touch()
    remove_abandoned_files(tmp_path, time.time())
    assert sorted(tmp_path.iterdir()) == sorted((left, offered, early, letter))
    remove_abandoned_files(tmp_path, later_s)
    assert sorted(tmp_path.iterdir()) == sorted((offered, letter))
    del region


def open_files() -> int:
    """Count files of /dev/shm that this process, and so the server in it, has open."""
    return len(shared_files())


def shared_files() -> frozenset[tuple[str, Path]]:
    """Return the descriptors of this process that are files of /dev/shm, with their paths."""
    found: set[tuple[str, Path]] = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a descriptor that another thread has closed meanwhile
            found.add((link.name, link.readlink()))
    return frozenset((name, path) for name, path in found if path.is_relative_to(SHARED_DIRECTORY))


def test_another_tenant_cannot_name_a_region(running: LoopbackServer, wire: Wire, path: Path) -> None:
    made(path)
    name = shared(wire, path)
    other = Wire(running, "team:writer")
    other.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
    with refused(PRECONDITION, "no such region"):
        get(other, range_of(name), 1)
    with refused(grpc.StatusCode.NOT_FOUND):
        other.ask(Call.UNSHARE, pb.UnshareRequest(region=name))
    other.close()
    assert running.service._regions.count("default") == 1


@pytest.mark.parametrize(
    ("at", "length"),
    [(0, REGION_BYTES + 1), (REGION_BYTES, 1), (2**64 - 1, 1), (0, 2**64 - 1), (2**63, 2**63), (0, OBJECT_BYTES - 1)],
)
def test_a_range_beyond_the_region_or_too_small_for_the_pages_is_an_invalid_argument(
    wire: Wire, path: Path, at: int, length: int
) -> None:
    region = made(path)
    name = shared(wire, path)
    put(wire, region, name, 1)
    with refused(BAD):
        get(wire, range_of(name, length, at), 1)
    with refused(BAD):
        wire.put([shared_start(range_of(name, length, at), 2), pb.PutPart(shared_bytes=OBJECT_BYTES)])
    assert get(wire, range_of(name), 1, 2) == (b"\x01\x00", OBJECT_BYTES)


def test_content_in_the_stream_and_in_memory_do_not_mix(wire: Wire, path: Path) -> None:
    made(path)
    where = range_of(shared(wire, path))
    for messages in (
        [shared_start(where, 1), part(page(1))],
        [start(1), pb.PutPart(shared_bytes=OBJECT_BYTES)],
        [shared_start(where, 1), pb.PutPart(shared_bytes=OBJECT_BYTES, content=b"x")],
        [shared_start(where, 1), pb.PutPart(shared_bytes=2**64 - 1)],
        [shared_start(where, 1), pb.PutPart(offset=2**64 - 1, shared_bytes=OBJECT_BYTES)],
        [shared_start(where, 1), pb.PutPart(offset=1, shared_bytes=OBJECT_BYTES)],
    ):
        with refused(BAD):
            wire.put(messages)
    assert get(wire, where, 1) == (b"\x00", 0)


def test_a_region_that_is_cut_off_costs_the_call_and_nothing_else(
    running: LoopbackServer, wire: Wire, path: Path
) -> None:
    put_whole = [start(1), part(page(1))]
    wire.put(put_whole)
    region = made(path)
    keep = os.open(path, os.O_RDWR)
    name = shared(wire, path)
    os.truncate(keep, 10)
    os.close(keep)
    with refused(PRECONDITION, "not there any more"):
        wire.put([shared_start(range_of(name), 2), pb.PutPart(shared_bytes=OBJECT_BYTES)])
    assert running.service._regions.count("default") == 0
    assert pb.GetPart.FromString(wire.get(pb.GetRequest(runs=[run(key(1), object_bytes=OBJECT_BYTES)]))[0]).hits
    wait_for(lambda: running.gate.in_flight_count == 0)
    del region


def test_bytes_that_change_after_they_were_named_never_change_a_page(wire: Wire, path: Path) -> None:
    region = made(path)
    name = shared(wire, path)

    def messages() -> Iterator[pb.PutPart]:
        yield shared_start(range_of(name), 1, 2)
        region.write((memoryview(page(1)),), 0)
        yield pb.PutPart(shared_bytes=OBJECT_BYTES)
        region.write((memoryview(page(2)),), OBJECT_BYTES)
        yield pb.PutPart(offset=OBJECT_BYTES, shared_bytes=OBJECT_BYTES)

    assert pb.PutReply.FromString(wire.put(messages())).stored == b"\x02\x02"
    region.write((memoryview(bytes(2 * OBJECT_BYTES)),), 0)
    where = range_of(name, start=8192)
    assert get(wire, where, 1, 2) == (b"\x01\x01", 2 * OBJECT_BYTES)
    assert bytes_in(region, 8192, 2 * OBJECT_BYTES) == page(1) + page(2)
    with refused(BAD):
        wire.put([shared_start(range_of(name), 3), pb.PutPart(shared_bytes=OBJECT_BYTES)])


def test_a_server_that_shares_nothing_says_so_and_refuses() -> None:
    running = LoopbackServer.start(MemoryStorage(), limits_with(regions_max=0))
    wire = Wire(running)
    assert pb.HelloReply.FromString(wire.ask(Call.HELLO, pb.HelloRequest())).region_bytes_max == 0
    with refused(PRECONDITION):
        wire.ask(Call.SHARE, pb.ShareRequest(name=NAME_PREFIX + "0" * 32, region_bytes=1, proof=PROOF))
    wire.close()
    running.stop()


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::1]:5000", True),
        ("unix:", True),
        ("unix:/run/x", True),
        ("ipv4:10.0.0.1:5000", False),
        ("ipv6:[::ffff:10.0.0.1]:5000", False),
        ("ipv4:1.127.0.0:1", False),
        ("", False),
        ("vsock:2:1", False),
    ],
)
def test_only_loopback_and_unix_sockets_are_this_machine(peer: str, is_local: bool) -> None:
    assert is_local_peer(peer) is is_local


@pytest.mark.parametrize(
    ("server", "is_here"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("unix:/x", True), ("10.0.0.1:1", False)],
)
def test_a_client_offers_memory_to_servers_that_are_named_as_this_machine(server: str, is_here: bool) -> None:
    assert named_here(server) is is_here
