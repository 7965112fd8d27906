"""The client of the service: its URL, where pages go, and what it makes of servers that fail."""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import grpc
import pytest

from tests.support.clock import ManualClock
from tests.support.service import LoopbackServer
from unified_cache.core.errors import ConfigError, InputError, StorageError
from unified_cache.core.pool import Identity
from unified_cache.core.seal import FORMAT_VERSION, HEADER_BYTES
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire.calls import Call
from unified_cache.proto.wire.parts import Chunk, decoded, encoded, parts_of
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.remote.scatter import ScatterReader
from unified_cache.storage_backends.remote.server import Server
from unified_cache.storage_backends.remote.store import AwaitReply, RemoteStorage, RendezvousHash, ServerBatch
from unified_cache.storage_backends.remote.url import RemoteOptions, parse_rest
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    open_for_contract,
    sealed_page,
)

KEYS = [sha256(b"%d" % number).digest() for number in range(3000)]


def test_a_url_says_servers_and_options() -> None:
    options = parse_rest("//a:1,b:2?timeout_s=0.5&channels=3&retries=0&tenant=t", secure=False)
    assert options == RemoteOptions(("a:1", "b:2"), tenant="t", timeout_s=0.5, channels=3, retries=0)
    assert parse_rest("//a:1", secure=True).credentials is not None


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "a:1",
        "//",
        "//a",
        "//a:1,a:1",
        "//a:1?x=1",
        "//a:1?timeout_s=0",
        "//a:1?timeout_s=x",
        "//a:1?channels=0",
        "//a:1?retries=-1",
        "//a:1?ca_file=x",
        "//a:1?token_file=/nowhere/at/all",
        "//a:1?timeout_s",
    ],
)
def test_a_url_that_makes_no_sense_is_a_config_error(rest: str) -> None:
    with pytest.raises(ConfigError):
        parse_rest(rest, secure=False)


@pytest.mark.threat("leaked credentials")
def test_a_token_is_read_from_a_file_and_never_shown(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("secret\n")
    options = parse_rest(f"//a:1?token_file={path}", secure=False)
    assert options.token == "secret"
    assert "secret" not in repr(options)


def test_a_service_is_opened_by_its_url() -> None:
    running = LoopbackServer.start(MemoryStorage())
    storage = open_for_contract(open_storage(f"grpc://{running.address}"))
    assert storage.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
    assert storage.exists([label(1)]) == [Answer.HIT]
    storage.close()
    running.stop()
    with pytest.raises(ConfigError, match="cap of its own"):
        open_storage("grpc://127.0.0.1:1", bytes_max=5)
    with pytest.raises(ConfigError, match=r"grpc:, grpcs:"):
        open_storage("nonsense:")


def test_pages_spread_evenly_and_only_those_of_a_server_that_left_move() -> None:
    three, two = RendezvousHash(["a:1", "b:1", "c:1"]), RendezvousHash(["a:1", "c:1"])
    shares = Counter(three.ranked(key)[0] for key in KEYS)
    assert all(900 < count < 1100 for count in shares.values())
    for key in KEYS:
        ranked = [number for number in three.ranked(key) if number != 1]
        assert [[0, 2].index(number) for number in ranked] == two.ranked(key)


def test_parts_are_what_protobuf_would_write_and_come_back_whole() -> None:
    choice = random.Random(3)
    for _ in range(100):
        pages = [choice.randbytes(choice.choice([0, 1, 50, 99, 100, 101, 950])) for _ in range(choice.randrange(1, 9))]
        messages = list(parts_of(((b"\1", (memoryview(page),)) for page in pages), 100))
        parts = [decoded(message) for message in messages]
        assert b"".join(part.content for part in parts) == b"".join(pages)
        assert b"".join(part.hits for part in parts) == b"\1" * len(pages)
        assert all(len(part.content) <= 100 for part in parts)
        assert [part.offset for part in parts] == [sum(len(p.content) for p in parts[:n]) for n in range(len(parts))]
        for message, part in zip(messages, parts, strict=True):
            assert decoded(b"\x1a\x00" + message) == part


@pytest.mark.parametrize(
    "message", [b"\x08", b"\x08\xff\xff", b"\x1a\x05abc", b"\x12\x09ab", b"\x0c", b"\x08" + b"\xff" * 11]
)
def test_what_is_no_part_is_an_input_error(message: bytes) -> None:
    with pytest.raises(InputError):
        decoded(message)


@pytest.mark.threat("unasked pages from a server")
@pytest.mark.parametrize(
    "part",
    [
        Chunk(1, b"\1", memoryview(b"")),
        Chunk(0, b"\1\1", memoryview(b"")),
        Chunk(0, b"\0", memoryview(b"x")),
        Chunk(0, b"\1", memoryview(bytes(HEADER_BYTES + 1001))),
    ],
)
def test_a_stream_that_is_not_what_was_asked_for_is_an_input_error(part: Chunk) -> None:
    reader = ScatterReader([blank_page(label(1))])
    with pytest.raises(InputError):
        reader.take(part)


class TwoServers:
    """Two servers with one store each, and a client whose pauses nobody waits for."""

    def __init__(self) -> None:
        self.servers = [LoopbackServer.start(MemoryStorage()) for _ in range(2)]
        self.clock = ManualClock(1000.0)
        self.pauses_s: list[float] = []
        options = RemoteOptions(tuple(running.address for running in self.servers), timeout_s=5.0)
        connected = [Server.connect(name, options, self.clock) for name in options.servers]
        self.storage = RemoteStorage(options, connected, self.pauses_s.append, random.Random(1))
        open_for_contract(self.storage)


@pytest.fixture
def two() -> Iterator[TwoServers]:
    two = TwoServers()
    yield two
    two.storage.close()
    for running in two.servers:
        running.stop()


def test_pages_are_spread_over_servers_and_listed_once(two: TwoServers) -> None:
    pages = [sealed_page(label(number)) for number in range(40)]
    assert all(two.storage.put(pages, Level.CACHED))
    assert all(0 < running.usage.held_bytes("default") < 40 * len(bytes_of(pages[0])) for running in two.servers)
    listed, cursor = [], ""
    while True:
        found = two.storage.scan(label(0).identity, cursor)
        listed += [stored.label for stored in found.objects]
        cursor = found.cursor
        if not cursor:
            break
    assert sorted(listed) == sorted(page.label for page in pages)
    assert two.storage.remove(listed) == 40
    with pytest.raises(InputError):
        two.storage.scan(label(0).identity, "9:")


def test_where_one_server_is_gone_the_other_stands_in(two: TwoServers) -> None:
    pages = [sealed_page(label(number)) for number in range(40)]
    two.servers[0].stop()
    assert all(two.storage.put(pages, Level.CACHED))
    found = [blank_page(page.label) for page in pages]
    assert all(two.storage.get(found))
    assert [bytes_of(page) for page in found] == [bytes_of(page) for page in pages]
    assert two.pauses_s == []
    with pytest.raises(StorageError) as caught:
        two.storage.remove([label(1)])
    assert caught.value.retryable


def test_a_clear_with_a_server_away_says_that_it_is_incomplete_and_the_next_generation_finds_nothing(
    two: TwoServers,
) -> None:
    pages = [sealed_page(label(number)) for number in range(40)]
    assert all(two.storage.put(pages, Level.CACHED))
    away = two.servers[0]
    away.callers.is_closed = True
    with pytest.raises(StorageError, match="1 of 2 servers were not cleared") as caught:
        two.storage.clear(label(0).identity)
    assert caught.value.retryable
    away.callers.is_closed = False
    two.clock.sleep(60.0)
    back = two.storage.get([blank_page(page.label) for page in pages]).count(Answer.HIT)
    assert 0 < back < 40  # what the server that was away still has
    renewed = replace(MODEL, generation=1)
    two.storage.register(manifest_of(renewed, LAYOUT), {})
    relabelled = [page.label._replace(identity=renewed.digest(LAYOUT)) for page in pages]
    assert two.storage.exists(relabelled) == [Answer.MISS] * 40
    assert two.storage.clear(label(0).identity) == back
    assert two.storage.exists([page.label for page in pages]) == [Answer.MISS] * 40


def test_pages_are_touched_at_their_own_servers_and_those_of_unknown_identities_nowhere() -> None:
    running = LoopbackServer.start(MemoryStorage(3 * PAGE_BYTES))
    storage = open_for_contract(running.client())
    for number in range(3):
        assert storage.put([sealed_page(label(number))], Level.CACHED) == [Answer.STORED]
    storage.touch([label(0), label(99), label(0, model=Identity("nobody's"))])
    assert storage.put([sealed_page(label(3))], Level.CACHED) == [Answer.STORED]
    assert storage.exists([label(number) for number in range(4)]) == [Answer.HIT, Answer.MISS, Answer.HIT, Answer.HIT]
    storage.close()
    running.stop()


class OlderHandler(grpc.GenericRpcHandler):
    """A server of before there was a touch."""

    def __init__(self, handler: grpc.GenericRpcHandler) -> None:
        self._handler = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        if handler_call_details.method == Call.TOUCH.path:
            return None
        return self._handler.service(handler_call_details)


def test_a_server_that_is_older_than_the_call_touches_nothing_and_serves_on() -> None:
    running = LoopbackServer.start(MemoryStorage())
    older = grpc.server(ThreadPoolExecutor(2))
    older.add_generic_rpc_handlers((OlderHandler(running.service.rpc_methods()),))
    port = older.add_insecure_port("127.0.0.1:0")
    older.start()
    storage = open_for_contract(RemoteStorage.open(RemoteOptions((f"127.0.0.1:{port}",))))
    assert storage.put([sealed_page(label(0))], Level.CACHED) == [Answer.STORED]
    storage.touch([label(0)])
    assert storage.exists([label(0)]) == [Answer.HIT]
    storage.close()
    older.stop(None).wait()
    running.stop()


def test_where_all_are_gone_it_is_a_retryable_error_after_a_pause(two: TwoServers) -> None:
    for running in two.servers:
        running.stop()
    with pytest.raises(StorageError) as caught:
        two.storage.exists([label(number) for number in range(9)])
    assert caught.value.retryable
    assert len(two.pauses_s) == 1
    assert 0.02 < two.pauses_s[0] < 0.06


def test_where_calls_are_refused_all_are_over_before_the_caller_is_told(two: TwoServers) -> None:
    labels = [label(number) for number in range(40)]
    waited: list[str] = []

    def start(batch: ServerBatch) -> AwaitReply:
        def await_reply() -> None:
            waited.append(batch.server.name)
            raise StorageError("no", retryable=False)

        return await_reply

    with pytest.raises(StorageError, match="no"):
        two.storage._send_with_failover(labels, [None] * len(labels), Call.EXISTS, start)
    assert len(set(waited)) == len(waited) == 2


def test_a_server_that_was_restarted_is_greeted_again(two: TwoServers) -> None:
    pages = [sealed_page(label(number)) for number in range(20)]
    assert all(two.storage.put(pages, Level.CACHED))
    port = two.servers[0].port
    two.servers[0].stop()
    two.servers[0] = LoopbackServer.start(MemoryStorage(), port=port)
    two.clock.now_s += 60
    hits = two.storage.get([blank_page(page.label) for page in pages])
    assert 0 < hits.count(Answer.HIT) < 20
    assert all(two.storage.put(pages, Level.CACHED))
    assert all(two.storage.get([blank_page(page.label) for page in pages]))


@pytest.mark.parametrize(
    ("flaw", "why"),
    [
        (Manifest(format_version=FORMAT_VERSION + 1), f"expected {FORMAT_VERSION}, found {FORMAT_VERSION + 1}"),
        (Manifest(dtype="fp8"), "must have that digest, found one of"),
    ],
    ids=["another format version", "the digest of another layout"],
)
def test_a_layout_that_no_server_takes_is_an_error_that_says_why(two: TwoServers, flaw: Manifest, why: str) -> None:
    refused = manifest_of(replace(MODEL, generation=1), LAYOUT)
    refused.MergeFrom(flaw)
    with pytest.raises(StorageError, match=why) as caught:
        two.storage.register(refused, {})
    assert not caught.value.retryable
    page = sealed_page(label(1)._replace(identity=refused.identity))
    with pytest.raises(InputError, match="register identity"):
        two.storage.put([page], Level.CACHED)
    assert two.storage.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]


def test_a_page_that_was_not_registered_cannot_be_put_and_is_absent(two: TwoServers) -> None:
    foreign = label(1)._replace(identity=bytes(32))
    with pytest.raises(InputError):
        two.storage.put([sealed_page(foreign)], Level.CACHED)
    assert two.storage.exists([foreign]) == [Answer.MISS]
    assert two.storage.get([blank_page(foreign)]) == [Answer.MISS]
    assert two.storage.remove([foreign]) == 0


def test_a_tenant_that_the_credentials_do_not_stand_for_is_refused(two: TwoServers) -> None:
    storage = RemoteStorage.open(RemoteOptions((two.servers[0].address,), token="a:writer", tenant="b"))
    with pytest.raises(StorageError, match="PERMISSION_DENIED"):
        open_for_contract(storage)
    storage.close()
    assert encoded(0, b"", ()) == b""
