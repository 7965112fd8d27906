"""Kinds of bad input to a whole server: each has its answer, changes nothing, and leaves the server at work."""

import hashlib
import importlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import grpc
import psutil
import pytest

from tests.support.running_service import RunningService, running
from tests.support.service import LoopbackServer, Wire, refused, wait_for
from tests.support.service_process import ServerProcess
from tests.unit.service.test_requests import (
    IDENTITY,
    MALFORMED,
    MANIFEST,
    NAMES,
    OBJECT_BYTES,
    STREAMS,
    changed,
    key,
    page,
    part,
    run,
    start,
)
from unified_cache.core.pool import Identity
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.settings.access import Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire.calls import Call
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.tokens import add_token, new_token
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.testing.storage_contract import LAYOUT

LIMITS = {"pages_max": 100, "tokens_max": 1000, "calls_max": 8, "public_calls_max": 1}
CALLERS = {
    "writer": Caller("acme", Role.WRITER),
    "reader": Caller("acme", Role.READER),
    "other": Caller("other", Role.ADMIN),
}
BAD = grpc.StatusCode.INVALID_ARGUMENT
DENIED = grpc.StatusCode.PERMISSION_DENIED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
NOBODY = grpc.StatusCode.UNAUTHENTICATED
OTHERWISE = grpc.StatusCode.FAILED_PRECONDITION
BOMB_BYTES = 200_000_000
BOMB_RSS_BYTES_MAX = 64 << 20


class ServerOverDirectory:
    """A server over a directory, with one page of ``acme`` in it and nothing in memory."""

    def __init__(self, server: RunningService, directory: Path, tokens: Mapping[str, str]) -> None:
        self.server = server
        self.directory = directory
        self.tokens = tokens
        self._wires = {name: self.wire(token) for name, token in tokens.items()}
        for wire in self._wires.values():
            wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST, vocabulary=32_000))
        self.writer = self._wires["writer"]
        self.put_page()

    def wire(self, token: str) -> Wire:
        """Connect with a token, whatever it is."""
        return Wire(cast("LoopbackServer", self.server), token)

    def of(self, name: str) -> Wire:
        """Return the connection of a caller."""
        return self._wires[name]

    def put_page(self) -> None:
        assert pb.PutReply.FromString(self.writer.put([start(0, level=pb.DURABLE), part(page(0))])).stored == b"\x02"

    def got(self) -> bytes:
        """Return what a get of the page says: 0 for a miss, 2 from the store."""
        request = pb.GetRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)])
        return b"".join(pb.GetPart.FromString(message).hits for message in self.writer.get(request))

    def paths(self) -> list[Path]:
        return sorted(path for path in self.directory.rglob("*.kv") if path.name.endswith(f"{key(0).hex()}.kv"))

    def state(self) -> tuple[str, bytes]:
        """Return a digest of the store's pages, and what the server says it has."""
        digest = hashlib.sha256()
        for path in sorted(path for suffix in ("kv", "swa") for path in self.directory.rglob(f"*.{suffix}")):
            digest.update(str(path).encode() + path.read_bytes())
        return digest.hexdigest(), self.writer.ask(Call.STATS, pb.StatsRequest())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.state()
        yield
        assert self.state() == before
        assert self.got() == b"\x02"

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()


@contextmanager
def world_in(directory: Path) -> Iterator[ServerOverDirectory]:
    tokens: dict[str, str] = {}
    for name, caller in CALLERS.items():
        tokens[name], entry = new_token(caller, None, secrets.token_bytes)
        add_token(directory / "tokens", entry)
    store = directory / "store"
    access = {"tokens": directory / "tokens"}
    with running(storage=f"file:{store}", access=access, limits=LIMITS) as opened:
        server = ServerOverDirectory(opened, store, tokens)
        yield server
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerOverDirectory]:
    with world_in(tmp_path_factory.mktemp("inputs")) as server:
        yield server


Send = Callable[[ServerOverDirectory], object]


def ask(call: Call, message: object, who: str = "writer") -> Send:
    return lambda server: server.of(who).ask(call, cast("bytes", message))


def put(*messages: pb.PutPart | bytes, who: str = "writer") -> Send:
    return lambda server: server.of(who).put(messages)


def look_up(**fields: object) -> Send:
    request = pb.LookupRequest(identity=IDENTITY)
    request.MergeFrom(pb.LookupRequest(**fields))  # type: ignore[arg-type]
    return ask(Call.LOOKUP, request)


def shown(token: str) -> Send:
    return lambda server: server.wire(token).ask(Call.STATS, b"")


def tokens(*ids: int, tenant: str | None = None) -> pb.Tokens:
    return pb.Tokens(ids=ids, namespace=pb.Namespace(tenant=tenant))


def other_token(change: Callable[[str], str]) -> Send:
    return lambda server: server.wire(change(server.tokens["writer"])).ask(Call.STATS, b"")


def unknown_method(server: ServerOverDirectory) -> None:
    with grpc.insecure_channel(server.server.address) as channel:
        begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.HELLO.path + "2")
        begin(b"", 10.0)


def without_token(server: ServerOverDirectory) -> None:
    with grpc.insecure_channel(server.server.address) as channel:
        begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.STATS.path)
        begin(b"", 10.0)


def flipped(at: int) -> bytes:
    spoilt = bytearray(page(1))
    spoilt[at] ^= 1
    return bytes(spoilt)


def renamed(**fields: object) -> pb.HelloRequest:
    return pb.HelloRequest(manifest=changed(**fields))


Rows = dict[int, tuple[grpc.StatusCode, dict[str, Send]]]

ROWS: Rows = {
    1: (
        BAD,
        {
            f"{call.value} {number}": ask(call, message)
            for call in (Call.HELLO, Call.LOOKUP, Call.EXISTS, Call.REMOVE)
            for number, message in enumerate(MALFORMED)
        }
        | {f"a put that begins with {number}": put(message) for number, message in enumerate(MALFORMED)}
        | {f"a part {number}": put(start(1), message) for number, message in enumerate(MALFORMED)},
    ),
    3: (grpc.StatusCode.UNIMPLEMENTED, {"a method": unknown_method}),
    4: (EXHAUSTED, {"a byte too many": ask(Call.EXISTS, bytes((4 << 20) + 1))}),
    5: (EXHAUSTED, {"64 KiB": shown("x" * (64 << 10))}),
    6: (
        NOBODY,
        {
            "none": without_token,
            "empty": shown(""),
            "shorter": other_token(lambda token: token[:-1]),
            "longer": other_token(lambda token: token + "0"),
            "other": other_token(lambda token: token[:-4] + ("0000" if token[-4:] != "0000" else "1111")),
            "other case": other_token(str.upper),
        },
    ),
    7: (
        DENIED,
        {
            "asserted": ask(Call.STATS, pb.StatsRequest(tenant="other")),
            "asserted by a put": put(pb.PutPart(start=pb.PutStart(tenant="other", runs=start(1).start.runs))),
            "asserted by a namespace": look_up(tokens=tokens(1, tenant="other")),
        },
    ),
    8: (
        DENIED,
        {
            "a reader puts": put(start(1), part(page(1)), who="reader"),
            "a reader removes": ask(Call.REMOVE, pb.RemoveRequest(runs=[run(key(0))]), "reader"),
            "a writer clears": ask(Call.CLEAR, b""),
            "a writer drains": ask(Call.DRAIN, b""),
        },
    ),
    10: (BAD, {"no keys": ask(Call.EXISTS, pb.ExistsRequest(runs=[run()]))}),
    11: (BAD, {repr(name[:20]): ask(Call.REMOVE, pb.RemoveRequest(runs=[run(name)])) for name in NAMES}),
    12: (
        BAD,
        {
            f"identity {name[:20]!r}": ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0), identity=name)]))
            for name in NAMES
            if name not in (b"", b" ")
        },
    ),
    13: (
        BAD,
        {
            repr(name[:20]): ask(Call.STATS, pb.StatsRequest(tenant=name))
            for name in ("", "x" * 65, "a\n", "a\0b", "../a", "A", "\u00e9", "-a", "default")
        },
    ),
    14: (BAD, {str(token): look_up(tokens=tokens(1, token)) for token in (-1, 2**31, 2**63 - 1, 32_000)}),
    16: (
        BAD,
        {
            "tokens": look_up(tokens=tokens(*[1] * 1001)),
            "keys": look_up(keys=pb.Keys(keys=map(key, range(101)))),
            "runs": ask(Call.EXISTS, pb.ExistsRequest(runs=[run(*map(key, range(60)))] * 2)),
        },
    ),
    17: (BAD, {"a page and a half": put(start(1, 2), part(page(1) + page(2)[: OBJECT_BYTES // 2]))}),
    18: (
        BAD,
        {
            str(count): put(start(1, object_bytes=count), part(bytes(count)))
            for count in (OBJECT_BYTES - 1, OBJECT_BYTES + 1, 0, 2 * OBJECT_BYTES)
        },
    ),
    19: (
        BAD,
        {f"byte {at}": put(start(1), part(flipped(at))) for at in (0, 4, 6, 8, 16, 48, 80, 112, 120, HEADER_BYTES)}
        | {"another page": put(start(1), part(page(2)))},
    ),
    20: (OTHERWISE, {"format version": ask(Call.HELLO, pb.HelloRequest(manifest=changed(format_version=2)))}),
    21: (
        BAD,
        {
            "of a page": ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0), pool="other")])),
            "of a lookup": look_up(keys=pb.Keys(keys=[key(0)]), pools=[pb.RequiredPool(name="../kv")]),
            "of no manifest": ask(Call.HELLO, pb.HelloRequest(manifest=Manifest(format_version=1, model="model"))),
            "of another identity": ask(Call.HELLO, renamed(identity=bytes(32))),
            **{
                f"with {sign!r}": ask(Call.HELLO, pb.HelloRequest(manifest=manifest_of(Identity(f"m{sign}"), LAYOUT)))
                for sign in ("\x1b", "\x9b", "\n", "\u202e", "\u2066", "\u2028")
            },
        },
    ),
    22: (BAD, {name: put(*messages) for name, messages in STREAMS.items()}),
    37: (OTHERWISE, {"a format version": ask(Call.HELLO, renamed(format_version=2))}),
}
"""By row of the catalogue: the status, and what is to have it."""

CASES = [
    pytest.param(code, send, id=f"{row}-{name}") for row, (code, sends) in ROWS.items() for name, send in sends.items()
]


@pytest.mark.threat("bad input")
@pytest.mark.threat("escapes on a terminal")
@pytest.mark.parametrize(("code", "send"), CASES)
def test_a_bad_input_has_its_status_and_changes_nothing(
    server: ServerOverDirectory, code: grpc.StatusCode, send: Send
) -> None:
    with server.unchanged(), refused(code):
        send(server)


HARMLESS: Mapping[int, Send] = {
    2: ask(Call.EXISTS, pb.ExistsRequest(runs=[run(key(0))]).SerializeToString() + b"\xfa\x3f\x03abc"),
    15: look_up(tokens=tokens()),
    34: lambda server: [
        future.result() for future in [server.writer.begin_put([start(0), part(page(0))]) for _ in range(4)]
    ],
}


@pytest.mark.parametrize("row", HARMLESS)
def test_an_input_that_only_looks_bad_is_answered_and_changes_nothing(server: ServerOverDirectory, row: int) -> None:
    with server.unchanged():
        HARMLESS[row](server)


ELSEWHERE: tuple[tuple[int, str], ...] = (
    (6, "unit.service.test_access::test_a_token_expires_after_its_last_day"),
    (9, "unit.service.test_tls::test_nobody_without_a_certificate_of_the_authority_gets_through_the_handshake"),
    (22, "unit.service.test_requests::test_a_put_that_its_client_cancels_leaves_nothing"),
    (23, "unit.service.test_tenancy::test_a_tenant_over_its_quota_is_told_when_to_come_back_and_others_go_on"),
    (24, "unit.service.test_server::test_a_call_whose_turn_does_not_come_is_refused"),
    (25, "unit.service.test_requests::test_a_put_that_its_client_cancels_leaves_nothing"),
    (25, "unit.service.test_requests::test_a_put_whose_deadline_passes_leaves_nothing"),
    (26, "unit.service.test_server::test_a_drain_lets_what_is_in_flight_end_and_refuses_what_is_new"),
    (27, "unit.service.test_faults::test_a_store_that_is_down_costs_misses_and_makes_puts_unavailable"),
    (27, "unit.service.test_faults::test_a_store_that_hangs_is_waited_for_in_bounds"),
    (28, "unit.service.test_faults::test_a_full_store_exhausts_a_resource_and_reads_go_on"),
    (32, "unit.service.test_requests::test_a_fault_of_the_server_is_internal_and_tells_no_text"),
    (33, "unit.service.test_server::test_connections_that_say_nothing_are_closed"),
    (33, "unit.service.test_faults::test_a_stream_that_goes_on_for_ever_is_cut_off"),
    (33, "unit.service.test_faults::test_a_reader_that_never_reads_is_cut_off"),
    (34, "unit.service.test_requests::test_the_same_put_many_times_over_is_stored_once"),
    (35, "unit.service.test_settings::test_a_setting_that_makes_no_sense_is_refused_in_one_line"),
    (35, "e2e.test_serve_command::test_what_cannot_be_served_is_refused_in_one_line"),
    (35, "e2e.test_serve_command::test_a_directory_that_others_may_write_or_an_address_in_use_is_refused"),
    (
        36,
        "unit.storage_backends.file.test_sharing::"
        "test_processes_in_one_directory_keep_the_cap_within_its_bound_and_one_of_them_may_be_killed",
    ),
    (36, "e2e.test_remote_failover::test_what_one_process_stored_another_finds_whatever_its_hash_seed"),
    (
        37,
        "unit.storage_backends.remote.test_storage::test_a_layout_that_no_server_takes_is_an_error_that_says_why",
    ),
)
"""Rows whose tests stand with what they test."""

HERE = frozenset({4, 24, 29, 30, 31})
"""Rows with tests of their own below."""


def test_every_row_has_a_test() -> None:
    assert ROWS.keys() | HARMLESS.keys() | HERE | {row for row, _ in ELSEWHERE} == set(range(1, 38))


@pytest.mark.parametrize("test", sorted({test for _, test in ELSEWHERE}))
def test_what_is_tested_elsewhere_is_there(test: str) -> None:
    module, _, name = test.partition("::")
    assert callable(vars(importlib.import_module(f"tests.{module}"))[name])


def test_a_message_of_zeros_that_arrives_small_costs_the_server_no_memory(tmp_path: Path) -> None:
    server = ServerProcess(str(tmp_path / "store"))
    channel = grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip)
    begin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.EXISTS.path)
    begin(pb.ExistsRequest().SerializeToString(), 10.0)
    memory = psutil.Process(server._running.pid).memory_info
    before_bytes = memory().rss
    with refused(EXHAUSTED):
        begin(bytes(BOMB_BYTES), 20.0)
    assert memory().rss - before_bytes < BOMB_RSS_BYTES_MAX
    begin(pb.ExistsRequest().SerializeToString(), 10.0)
    channel.close()
    server.kill()


def test_calls_beyond_those_of_all_tenants_exhaust_a_resource_and_others_go_on_later(
    server: ServerOverDirectory,
) -> None:
    stop = threading.Event()

    def messages() -> Iterator[bytes]:
        stop.wait(20)
        yield b""

    def is_full() -> bool:
        try:
            server.writer.ask(Call.STATS, b"")
        except grpc.RpcError as error:
            return cast("grpc.Call", error).code() is EXHAUSTED
        return False

    before = server.state()
    waiting = [server.of(who).begin_put(messages()) for who in ("writer", "other") for _ in range(16)]
    wait_for(is_full)
    stop.set()
    codes = {cast("grpc.Call", each).code() for each in waiting}
    assert codes <= {BAD, EXHAUSTED}
    assert server.state() == before
    assert server.got() == b"\x02"


def flawed_count(server: ServerOverDirectory) -> float:
    return sum(count for name, count in server.server.metrics().items() if "flawed_pages_total" in name)


CANARY = "unified-cache-canary"
PICKLE = b"cos\nsystem\n(S'touch " + CANARY.encode() + b"'\ntR."


def with_bit(bit: int) -> Callable[[bytes], bytes]:
    at, mask = bit // 8, 1 << bit % 8
    return lambda whole: whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :]


BITS = (*range(0, 8 * HEADER_BYTES, 61), 8 * HEADER_BYTES + 3, 8 * OBJECT_BYTES - 1)
DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "magic": lambda whole: b"\0" + whole[1:],
    "version": lambda whole: whole[:4] + bytes([whole[4] + 1]) + whole[5:],
    "zeros": lambda whole: bytes(len(whole)),
    "another page": lambda whole: page(1),
    "a pickle": lambda whole: PICKLE + whole[len(PICKLE) :],
    **{f"bit {bit}": with_bit(bit) for bit in BITS},
}


@pytest.mark.threat("changed bytes in the store")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_page_that_was_changed_in_the_store_is_a_miss_that_is_cleared_away_and_counted(
    server: ServerOverDirectory, damage: str
) -> None:
    (path,) = server.paths()
    flawed = flawed_count(server)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert server.got() == b"\x00"
    assert server.paths() == []
    assert flawed_count(server) == flawed + 1
    assert not Path(CANARY).exists()
    server.put_page()
    assert server.got() == b"\x02"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def hard_link(path: Path) -> None:
    path.unlink()
    elsewhere = path.with_name("x")
    elsewhere.write_bytes(page(0))
    path.hardlink_to(elsewhere)
    elsewhere.unlink()


@pytest.mark.parametrize("replace", [cut, lengthened, link, pipe, directory, hard_link])
def test_what_lies_in_the_place_of_a_page_is_a_miss_and_nothing_waits_for_it(
    server: ServerOverDirectory, replace: Callable[[Path], None]
) -> None:
    (path,) = server.paths()
    replace(path)
    assert server.got() == b"\x00"
    server.put_page()
    assert server.got() == b"\x02"


@pytest.mark.threat("bad input")
def test_code_in_every_field_of_bytes_is_refused_and_never_runs(server: ServerOverDirectory) -> None:
    name = PICKLE.ljust(32)[:32]
    with server.unchanged(), refused(BAD):
        server.writer.put([start(1), part(PICKLE.ljust(OBJECT_BYTES))])
    with server.unchanged(), refused(OTHERWISE):
        server.writer.ask(Call.SCAN, pb.ScanRequest(identity=name))
    with server.unchanged():
        assert (
            pb.ExistsReply.FromString(server.writer.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(name)]))).found == b"\0"
        )
    assert not Path(CANARY).exists()
