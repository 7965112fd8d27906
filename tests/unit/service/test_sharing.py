"""Pages through shared memory: used where it can be, refused where it is not what it says, never believed twice."""

import ctypes
import fcntl
import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.support.clock import ManualClock
from tests.support.service import LoopbackServer, Wire, limits_with, refused, wait_for
from tests.unit.service.test_requests import BAD, MANIFEST, OBJECT_BYTES, key, page, part, run, start
from unified_cache.proto import service_pb2 as pb
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.wire.calls import Call
from unified_cache.wire.local_sockets import SOCKET_PROOF_BYTES, SocketOffer
from unified_cache.wire.sharing import (
    HELD_BYTES_MAX,
    SEALS,
    RegionOffer,
    RegionTie,
    SharedRegion,
    is_local_peer,
    named_here,
)

LIMITS = limits_with(regions_max=3, region_bytes_max=1 << 20, region_idle_s=60.0)
REGION_BYTES = 64 << 10
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
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


class Offered:
    """Memory on offer, and what becomes of it: the end of a client that this process is, too."""

    def __init__(self, offer: RegionOffer) -> None:
        self.offer = offer
        self.region = offer.region
        self.tie: RegionTie | None = None

    def message(self, region_bytes: int | None = None) -> pb.ShareRequest:
        return pb.ShareRequest(
            region_bytes=self.region.region_bytes if region_bytes is None else region_bytes,
            socket_name=self.offer.socket_name,
            socket_proof=self.offer.socket_proof,
        )

    def shared(self, ask: Callable[[pb.ShareRequest], bytes], region_bytes: int | None = None) -> str:
        """Hand the memory over while ``ask`` offers it; return the server's name for it."""
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(ask, self.message(region_bytes))
            asked.add_done_callback(lambda _: self.offer.withdraw())
            self.tie = self.offer.hand_over()
            return pb.ShareReply.FromString(asked.result()).region

    def close(self) -> None:
        self.offer.close()
        self.let_go()

    def let_go(self) -> None:
        """Do what the end of a process does."""
        if self.tie is not None:
            self.tie.close()


@contextmanager
def offered(region_bytes: int = REGION_BYTES) -> Iterator[Offered]:
    with closing(Offered(RegionOffer.make(region_bytes))) as made:
        yield made


@pytest.fixture
def memory() -> Iterator[Offered]:
    with offered() as made:
        yield made


def asking(wire: Wire) -> Callable[[pb.ShareRequest], bytes]:
    return partial(wire.ask, Call.SHARE)


def shared(wire: Wire, memory: Offered) -> str:
    return memory.shared(asking(wire))


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


def test_pages_go_both_ways_through_memory_that_has_no_name(wire: Wire, memory: Offered) -> None:
    name, region = shared(wire, memory), memory.region
    assert put(wire, region, name, 1, at=4096) == b"\x02"
    assert put(wire, region, name, 2) == b"\x02"
    assert get(wire, range_of(name, start=8192), 1, 3, 2) == (b"\x01\x00\x01", 2 * OBJECT_BYTES)
    assert bytes_in(region, 8192, 2 * OBJECT_BYTES) == page(1) + page(2)


def test_a_region_moves_any_number_of_buffers_in_their_order(memory: Offered) -> None:
    region = memory.region
    content = os.urandom(3 * BUFFERS)
    view = memoryview(bytearray(content))
    region.write([view[3 * number : 3 * number + 3] for number in range(BUFFERS)], 7)
    found = memoryview(bytearray(3 * BUFFERS))
    region.read_into([found[:4], found[:0], *(found[at : at + 1] for at in range(4, 3 * BUFFERS))], 7)
    assert bytes(found) == content


@pytest.mark.parametrize("count_bytes", [HELD_BYTES_MAX, HELD_BYTES_MAX + 1], ids=["short", "long"])
def test_a_copy_of_any_length_moves_all_of_it_and_nothing_else(count_bytes: int) -> None:
    with offered(4 * HELD_BYTES_MAX) as made:
        content, found = memoryview(bytearray(os.urandom(count_bytes))), memoryview(bytearray(count_bytes))
        made.region.write((content,), 100)
        made.region.read_into((found,), 100)
        assert found == content
        assert bytes_in(made.region, 0, 100) == bytes(100)
        assert bytes_in(made.region, 100 + count_bytes, 100) == bytes(100)


def sealed(seals: int = SEALS, region_bytes: int = REGION_BYTES) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, region_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def without_seals() -> int:
    return sealed(0)


def that_may_shrink() -> int:
    return sealed(SEALS & ~fcntl.F_SEAL_SHRINK)


def that_may_grow() -> int:
    return sealed(SEALS & ~fcntl.F_SEAL_GROW)


def that_may_be_sealed_further() -> int:
    return sealed(SEALS & ~fcntl.F_SEAL_SEAL)


def too_short() -> int:
    return sealed(region_bytes=REGION_BYTES - 1)


def too_long() -> int:
    return sealed(region_bytes=REGION_BYTES + 1)


def that_nobody_may_write() -> int:
    return sealed(SEALS | fcntl.F_SEAL_WRITE)


def open_for_reading() -> int:
    descriptor = sealed()
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    finally:
        os.close(descriptor)


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(REGION_BYTES)
        return os.dup(file.fileno())


def a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def a_directory() -> int:
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY)


@pytest.mark.parametrize(
    "make",
    [
        without_seals,
        that_may_shrink,
        that_may_grow,
        that_may_be_sealed_further,
        too_short,
        too_long,
        that_nobody_may_write,
        open_for_reading,
        a_file,
        a_pipe,
        a_directory,
    ],
    ids=lambda make: make.__name__,
)
def test_what_is_not_as_it_must_be_is_refused_and_not_kept(
    running: LoopbackServer, wire: Wire, memory: Offered, make: Callable[[], int]
) -> None:
    descriptor = make()
    with closing(Offered(RegionOffer(descriptor, memory.region, SocketOffer.listen()))) as other:
        before = descriptors_count()
        with refused(PRECONDITION):
            shared(wire, other)
        other.let_go()
        wait_for(lambda: descriptors_count() <= before)
    assert running.service._regions.count("default") == 0


@pytest.mark.parametrize("descriptors_count", [0, 2], ids=["none", "two"])
def test_one_descriptor_comes_and_no_other_number(wire: Wire, memory: Offered, descriptors_count: int) -> None:
    with closing(SocketOffer.listen()) as listener, ThreadPoolExecutor(1) as asking:
        request = pb.ShareRequest(region_bytes=REGION_BYTES, socket_name=listener.name, socket_proof=listener.proof)
        asked = asking.submit(wire.ask, Call.SHARE, request)
        connection = listener.accepted()
        with connection:
            socket.send_fds(connection, [b"m"], [memory.offer._descriptor] * descriptors_count)
            with refused(PRECONDITION, "expected one descriptor"):
                asked.result()


def test_a_client_that_connects_and_hands_nothing_over_is_refused_in_time(
    running: LoopbackServer, wire: Wire, memory: Offered
) -> None:
    with closing(SocketOffer.listen()) as listener, ThreadPoolExecutor(1) as asking:
        request = pb.ShareRequest(region_bytes=REGION_BYTES, socket_name=listener.name, socket_proof=listener.proof)
        asked = asking.submit(wire.ask, Call.SHARE, request)
        connection = listener.accepted()
        # Others share meanwhile: nobody waits for one that is slow.
        name = shared(wire, memory)
        assert put(wire, memory.region, name, 1) == b"\x02"
        with refused(PRECONDITION):
            asked.result()
        connection.close()
    assert running.service._regions.count("default") == 1


def test_who_has_memory_that_is_shared_can_neither_cut_it_off_nor_take_its_seals(wire: Wire, memory: Offered) -> None:
    name = shared(wire, memory)
    descriptor = memory.offer._descriptor
    for length in (0, 10, REGION_BYTES - 1, REGION_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert put(wire, memory.region, name, 1) == b"\x02"


def test_memory_with_holes_is_filled_before_it_is_mapped(wire: Wire) -> None:
    descriptor = sealed()
    offer = RegionOffer(descriptor, SharedRegion.mapped(descriptor, REGION_BYTES), SocketOffer.listen())
    with closing(Offered(offer)) as made:
        # A hole that is punched later costs the memory anew, and nothing else.
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.fallocate(descriptor, 0x03, ctypes.c_long(0), ctypes.c_long(REGION_BYTES)) == 0
        name = shared(wire, made)
        assert os.fstat(descriptor).st_blocks * 512 == REGION_BYTES
        assert put(wire, made.region, name, 1) == b"\x02"
        assert libc.fallocate(descriptor, 0x03, ctypes.c_long(0), ctypes.c_long(REGION_BYTES)) == 0
        assert get(wire, range_of(name), 1) == (b"\x01", OBJECT_BYTES)
        assert bytes_in(made.region, 0, OBJECT_BYTES) == page(1)


@pytest.mark.parametrize("name", ["", "x", "../etc/passwd", "unified-cache-", "unified-cache-" + "A" * 32])
def test_a_name_of_another_form_is_refused(wire: Wire, name: str) -> None:
    request = pb.ShareRequest(region_bytes=REGION_BYTES, socket_name=name, socket_proof=bytes(SOCKET_PROOF_BYTES))
    with refused(PRECONDITION):
        wire.ask(Call.SHARE, request)


def test_a_socket_that_nobody_listens_at_is_refused(wire: Wire, memory: Offered) -> None:
    request = memory.message()
    memory.offer.withdraw()
    with refused(PRECONDITION, "nobody listens there"):
        wire.ask(Call.SHARE, request)


@pytest.mark.parametrize("region_bytes", [0, LIMITS.region_bytes_max + 1, 2**64 - 1])
def test_a_region_of_no_bytes_or_too_many_is_refused(wire: Wire, memory: Offered, region_bytes: int) -> None:
    with refused(PRECONDITION, "a region has"):
        wire.ask(Call.SHARE, memory.message(region_bytes))


def test_a_tenant_has_a_bounded_number_of_regions_and_others_have_theirs(running: LoopbackServer, wire: Wire) -> None:
    with ExitStack() as held:

        def offered_by(by: Wire) -> str:
            return shared(by, held.enter_context(offered()))

        names = [offered_by(wire) for _ in range(LIMITS.regions_max)]
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            offered_by(wire)
        other = Wire(running, "team:writer")
        offered_by(other)
        other.close()
        wire.ask(Call.UNSHARE, pb.UnshareRequest(region=names[0]))
        offered_by(wire)


def test_a_region_that_nobody_names_is_let_go_and_calls_that_name_it_later_are_refused(
    running: LoopbackServer, wire: Wire, memory: Offered, clock: ManualClock
) -> None:
    name = shared(wire, memory)
    assert memory.tie is not None
    put(wire, memory.region, name, 1)
    clock.now_s += LIMITS.region_idle_s - 1
    assert get(wire, range_of(name), 1) == (b"\x01", OBJECT_BYTES)
    assert not memory.tie.has_ended
    clock.now_s += LIMITS.region_idle_s
    running.service._regions.sweep()
    assert memory.tie.has_ended
    with refused(PRECONDITION, "no such region"):
        get(wire, range_of(name), 1)


def test_the_regions_of_a_client_that_died_are_let_go_before_they_are_idle(running: LoopbackServer, wire: Wire) -> None:
    before = mapped_count()
    with ExitStack() as held:
        made = [held.enter_context(offered()) for _ in range(LIMITS.regions_max)]
        names = [shared(wire, each) for each in made]
        running.service._regions.sweep()
        put(wire, made[0].region, names[0], 1)
        assert mapped_count() == before + 2 * LIMITS.regions_max  # this process is both ends
        del made
    running.service._regions.sweep()
    assert (mapped_count(), running.service._regions.count("default")) == (before, 0)


def test_a_client_that_died_leaves_its_place_to_the_next_one(running: LoopbackServer, wire: Wire) -> None:
    with ExitStack() as held:
        for _ in range(LIMITS.regions_max):
            shared(wire, held.enter_context(offered()))
        assert running.service._regions.count("default") == LIMITS.regions_max
    with offered() as next_one:
        shared(wire, next_one)
        assert running.service._regions.count("default") == 1


DIES = """
import signal, sys
import grpc
from unified_cache.proto import service_pb2 as pb
from unified_cache.wire.calls import Call
from unified_cache.wire.sharing import RegionOffer
offer = RegionOffer.make(1 << 16)
request = pb.ShareRequest(region_bytes=1 << 16, socket_name=offer.socket_name, socket_proof=offer.socket_proof)
with grpc.insecure_channel(sys.argv[1]) as channel:
    asked = channel.unary_unary(Call.SHARE.path).future(request.SerializeToString(), 10.0)
    tie = offer.hand_over()
    print(pb.ShareReply.FromString(asked.result()).region, flush=True)
signal.pause()
"""


def test_a_killed_client_leaves_no_memory_and_a_call_under_way_over_its_region_goes_on(
    running: LoopbackServer, wire: Wire
) -> None:
    before = mapped_count()
    regions = running.service._regions
    command = [sys.executable, "-c", DIES, running.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        name = client.stdout.readline().strip()
        with regions.window("default", range_of(name)) as window:
            client.kill()
            client.wait()
            regions.sweep()
            assert regions.count("default") == 0
            window.write((memoryview(page(1)),), 0)
            found = memoryview(bytearray(OBJECT_BYTES))
            window.read_into((found,), 0)
            assert bytes(found) == page(1)
            del window
    wait_for(lambda: mapped_count() == before)


def descriptors_count() -> int:
    """Count the descriptors of this process, and so of the server in it."""
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped_count() -> int:
    """Count regions that this process, and so the server in it, has mapped."""
    gc.collect()  # what a failed call held
    return sum("/memfd:unified-cache" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_another_tenant_cannot_name_a_region(running: LoopbackServer, wire: Wire, memory: Offered) -> None:
    name = shared(wire, memory)
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
    wire: Wire, memory: Offered, at: int, length: int
) -> None:
    name = shared(wire, memory)
    put(wire, memory.region, name, 1)
    with refused(BAD):
        get(wire, range_of(name, length, at), 1)
    with refused(BAD):
        wire.put([shared_start(range_of(name, length, at), 2), pb.PutPart(shared_bytes=OBJECT_BYTES)])
    assert get(wire, range_of(name), 1, 2) == (b"\x01\x00", OBJECT_BYTES)


def test_content_in_the_stream_and_in_memory_do_not_mix(wire: Wire, memory: Offered) -> None:
    where = range_of(shared(wire, memory))
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


def test_bytes_that_change_after_they_were_named_never_change_a_page(wire: Wire, memory: Offered) -> None:
    region = memory.region
    name = shared(wire, memory)

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
        wire.ask(Call.SHARE, pb.ShareRequest(region_bytes=1))
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
