"""The client of the service: its URL, where pages go, and what it makes of servers that fail."""

import gc
import platform
import random
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import repeat
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from tests.support.cache import ToyEngine, WholePromptCache, toy_layout
from tests.support.clock import ManualClock
from tests.support.files import held, hits, put
from tests.support.operations import PAGE, serve, started, tokens
from tests.support.service import LoopbackServer
from tests.support.store_calls import ScriptedStorage
from unified_cache.components import Full
from unified_cache.controller import InlineWorkers, OperationState
from unified_cache.core.config import CacheConfig, GuardConfig, WritePolicy
from unified_cache.core.errors import ConfigError, InputError, StorageError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import FORMAT_VERSION, HEADER_BYTES, Label, PageChecksum, verify_buffers
from unified_cache.core.window import SPAN_ALL
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire import REASON, REASON_HELLO, Call, decoded, parts_of, put_begun
from unified_cache.service.limits import Limits
from unified_cache.storage_backends.common.bounded_call import StoreStep, current_call, run_here
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.remote.credentials import ClientCredentials, CredentialFiles
from unified_cache.storage_backends.remote.server import Server
from unified_cache.storage_backends.remote.store import (
    Exchange,
    RemoteStorage,
    RendezvousHash,
    RequestTime,
    ServerBatch,
)
from unified_cache.storage_backends.remote.url import RemoteOptions, parse_rest
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import Method, StorageGuard
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    listing,
    open_for_contract,
    sealed_page,
)

KEYS = [sha256(b"%d" % number).digest() for number in range(3000)]


def test_a_url_says_servers_and_options() -> None:
    options = parse_rest("//a:1,b:2?timeout_s=0.5&channels=3", secure=False)
    assert options == RemoteOptions(("a:1", "b:2"), timeout_s=0.5, channels=3)
    assert parse_rest("//a:1", secure=True).secure


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
        "//a:1?ca_file=x",
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
    read = ClientCredentials(options.files, secure=False).latest()
    assert read.token == "secret"
    assert "secret" not in f"{options} {read}"


@pytest.mark.parametrize("spoilt", ["", None])
def test_a_token_that_cannot_be_read_is_refused_at_first_and_later_the_last_one_holds(
    tmp_path: Path, spoilt: str | None
) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="token"):
        open_storage(f"grpc://127.0.0.1:1?token_file={path}")
    path.write_text("one")
    read = ClientCredentials(CredentialFiles(path), secure=False)
    path.unlink()
    if spoilt is not None:
        path.write_text(spoilt)
    assert [read.latest().token for _ in range(2)] == ["one", "one"]
    path.write_text("another")
    assert read.latest().token == "another"


def test_no_proxy_that_the_environment_names_sees_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("no_grpc_proxy", raising=False)
        running = LoopbackServer.start(MemoryStorage())
        with closing(open_for_contract(open_storage(f"grpc://{running.address}?timeout_s=5"))) as storage:
            assert storage.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
        running.stop()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_pages_are_got_on_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    starting: list[int] = []
    start = threading.Thread.start

    def noted(self: threading.Thread) -> None:
        starting.append(threading.get_ident())
        start(self)

    running = LoopbackServer.start(MemoryStorage())
    with closing(open_for_contract(running.client())) as storage:
        assert storage.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
        monkeypatch.setattr(threading.Thread, "start", noted)
        assert storage.get([blank_page(label(1))]) == [Answer.HIT]
    assert threading.get_ident() not in starting
    running.stop()


def test_a_service_has_no_cap_of_its_clients_and_a_scheme_that_is_none_is_refused() -> None:
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


def test_pages_that_fit_into_one_message_are_put_by_one() -> None:
    for pages_count in (1, 3, 4):
        content = [(b"", (memoryview(bytes([number]) * 30),)) for number in range(pages_count)]
        begin = pb.PutPart(start=pb.PutStart(level=pb.DURABLE))
        messages = list(parts_of(content, 90, begin.SerializeToString()))
        start, first = put_begun(messages[0])
        assert start == begin.start
        assert len(messages) == (2 if pages_count > 3 else 1)
        joined = b"".join([first.content, *(decoded(message).content for message in messages[1:])])
        assert joined == b"".join(buffer for _, (buffer,) in content)


FREED = """
import resource
from unified_cache.storage_backends.url import open_storage

def faults_so_far():
    messages = [b"x" * (1 << 20) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

store = open_storage("grpc://127.0.0.1:1")
faults_so_far()
print(-faults_so_far() + faults_so_far())
"""
"""Prints the page faults of messages that come after as many that were freed."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_a_process_with_a_client_uses_the_memory_of_freed_messages_again() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 256, "of each message a page fault for every 4 KiB"


@contextmanager
def served(
    store: Store, timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> Iterator[RemoteStorage]:
    """Serve a store, one page a call where the client has a clock of its own, and yield the client."""
    limits = Limits() if clock is time.monotonic else Limits(pages_max=1)
    running = LoopbackServer.start(store, limits)
    options = RemoteOptions((running.address,), timeout_s=timeout_s)
    with closing(RemoteStorage.open(options, clock)) as storage:
        yield storage
    running.stop()


Replaced = dict[Call, "grpc.RpcMethodHandler[bytes, bytes]"]
"""Handlers by call."""


@contextmanager
def replaced_calls() -> Iterator[tuple[Replaced, str]]:
    """Serve a store in memory, but for the calls that are replaced; yield the table of these, and the address."""
    running = LoopbackServer.start(MemoryStorage())
    replaced: Replaced = {}

    class ReplacingHandler(grpc.GenericRpcHandler):
        def service(
            self, handler_call_details: grpc.HandlerCallDetails
        ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
            for call, handler in replaced.items():
                if handler_call_details.method == call.path:
                    return handler
            return running.service.rpc_methods().service(handler_call_details)

    server = grpc.server(ThreadPoolExecutor(4), options=Limits().channel_options())
    server.add_generic_rpc_handlers((ReplacingHandler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield replaced, f"127.0.0.1:{port}"
    server.stop(None).wait()
    running.stop()


class TwoServers:
    """Two servers with one store each, and a client."""

    def __init__(self) -> None:
        self.servers = [LoopbackServer.start(MemoryStorage()) for _ in range(2)]
        self.clock = ManualClock(1000.0)
        options = RemoteOptions(tuple(running.address for running in self.servers), timeout_s=5.0)
        connected = [Server.connect(name, options, self.clock) for name in options.servers]
        self.storage = RemoteStorage(options, connected)
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
    listed = [stored.label for stored in listing(two.storage, label(0).identity)]
    assert sorted(listed) == sorted(page.label for page in pages)
    assert two.storage.remove(listed) == 40
    with pytest.raises(InputError):
        two.storage.scan(label(0).identity, "9:")


def test_where_one_server_is_gone_the_other_stands_in(two: TwoServers) -> None:
    two.servers[0].stop()
    assert put(two.storage, range(40)) == [True] * 40
    assert hits(two.storage, range(40)) == [True] * 40
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
    with served(MemoryStorage(3 * PAGE_BYTES)) as storage:
        open_for_contract(storage)
        for number in range(3):
            assert put(storage, [number]) == [True]
        storage.touch([label(0), label(99), label(0, model=Identity("nobody's"))])
        assert put(storage, [3]) == [True]
        assert held(storage, 4) == [0, 2, 3]


def test_where_calls_are_refused_all_are_over_before_the_caller_is_told(two: TwoServers) -> None:
    labels = [label(number) for number in range(40)]
    waited: list[str] = []

    def exchange(batch: ServerBatch) -> Exchange:
        yield
        waited.append(batch.server.name)
        raise StorageError("no", retryable=False)

    with pytest.raises(StorageError, match="no"):
        two.storage._send_with_failover(labels, [None] * len(labels), Call.EXISTS, exchange)
    assert len(set(waited)) == len(waited) == 2


def test_a_server_that_was_restarted_is_greeted_again(two: TwoServers) -> None:
    assert put(two.storage, range(20)) == [True] * 20
    port = two.servers[0].port
    two.servers[0].stop()
    two.servers[0] = LoopbackServer.start(MemoryStorage(), port=port)
    two.clock.now_s += 60
    assert 0 < hits(two.storage, range(20)).count(True) < 20
    assert put(two.storage, range(20)) == [True] * 20
    assert hits(two.storage, range(20)) == [True] * 20


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


def test_a_page_that_was_not_registered_cannot_be_put_and_nobody_knows_whether_it_is_there(two: TwoServers) -> None:
    foreign = label(1)._replace(identity=bytes(32))
    with pytest.raises(InputError):
        two.storage.put([sealed_page(foreign)], Level.CACHED)
    assert two.storage.exists([foreign]) == [Answer.UNAVAILABLE]
    assert two.storage.get([blank_page(foreign)]) == [Answer.UNAVAILABLE]
    with pytest.raises(InputError):
        two.storage.scan(foreign.identity)
    assert two.storage.remove([foreign]) == 0


# A server whose answers make no sense: each call of its client fails as a call to a store does


NO_MESSAGE = b"\xff\xff\xff"
ASKED: dict[Call, Callable[[RemoteStorage], object]] = {
    Call.HELLO: lambda storage: storage.capability(),
    Call.EXISTS: lambda storage: storage.exists([label(0), label(1)]),
    Call.GET: lambda storage: storage.get([blank_page(label(0))]),
    Call.PUT: lambda storage: storage.put([sealed_page(label(0)), sealed_page(label(1))], Level.CACHED),
    Call.REMOVE: lambda storage: storage.remove([label(0)]),
    Call.CLEAR: lambda storage: storage.clear(label(0).identity),
    Call.SCAN: lambda storage: storage.scan(label(0).identity),
    Call.IDENTITIES: lambda storage: storage.manifests(),
}
"""A call of the client for each call of the contract whose answer it reads."""


def outcome(ask: Callable[[RemoteStorage], object], call: Call, answer: bytes) -> object:
    with replaced_calls() as (replaced, address):
        storage = RemoteStorage.open(RemoteOptions((address,)))
        if call is not Call.HELLO:
            open_for_contract(storage)
        if call is Call.GET:
            replaced[call] = grpc.unary_stream_rpc_method_handler(lambda request, context: iter([answer]))
        else:
            replaced[call] = grpc.stream_unary_rpc_method_handler(lambda sent, context: next(answer for _ in sent))
        try:
            return ask(storage)
        finally:
            storage.close()


@pytest.mark.threat("strange answers of a server")
@pytest.mark.parametrize("call", ASKED, ids=lambda call: call.value)
def test_an_answer_that_is_no_message_is_a_failure_of_the_store(call: Call) -> None:
    with pytest.raises(StorageError):
        outcome(ASKED[call], call, NO_MESSAGE)


@pytest.mark.threat("strange answers of a server")
@pytest.mark.threat("unasked pages from a server")
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (Call.GET, pb.GetPart(offset=1, hits=b"\1")),
        (Call.GET, pb.GetPart(hits=b"\1\1")),
        (Call.GET, pb.GetPart(hits=b"\0", content=b"x")),
        (Call.GET, pb.GetPart(hits=b"\1", content=bytes(PAGE_BYTES + 1))),
        (Call.EXISTS, pb.ExistsReply(found=b"\1")),
        (Call.EXISTS, pb.ExistsReply(found=b"\1\1\1")),
        (Call.EXISTS, pb.ExistsReply(found=b"\0\0", reasons=b"\1")),
        (Call.PUT, pb.PutReply(stored=b"\1")),
        (Call.PUT, pb.PutReply(stored=b"\1\1\1")),
        (Call.PUT, pb.PutReply(stored=b"\0\0", reasons=b"\1\1\1")),
        (Call.SCAN, pb.ScanReply(runs=[pb.PageRun(identity=b"short", pool="full", keys=[b"short"])])),
        (Call.HELLO, pb.HelloReply(pages_max=0, part_bytes=0)),
    ],
    ids=lambda each: each.value if isinstance(each, Call) else repr(each)[:40],
)
def test_an_answer_for_other_pages_than_asked_for_is_a_failure_of_the_store(call: Call, answer: Message) -> None:
    with pytest.raises(StorageError):
        outcome(ASKED[call], call, answer.SerializeToString())


def test_a_server_that_wants_hello_as_often_as_it_is_asked_is_asked_again_later() -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(((REASON, REASON_HELLO),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "say Hello")
        raise AssertionError

    with replaced_calls() as (replaced, address):
        replaced[Call.EXISTS] = grpc.unary_unary_rpc_method_handler(refuse)
        storage = open_for_contract(RemoteStorage.open(RemoteOptions((address,))))
        with pytest.raises(StorageError) as refused:
            storage.exists([label(0)])
        assert refused.value.retryable
        storage.close()


@pytest.mark.threat("strange answers of a server")
def test_an_answer_without_an_end_ends_no_call_late() -> None:
    with replaced_calls() as (replaced, address):
        replaced[Call.GET] = grpc.unary_stream_rpc_method_handler(lambda request, context: repeat(b""))
        storage = open_for_contract(RemoteStorage.open(RemoteOptions((address,), timeout_s=0.3)))
        with pytest.raises(StorageError, match="DEADLINE_EXCEEDED"):
            storage.get([blank_page(label(0))])
        storage.close()


# The client's calls end by themselves, and leave the caller's pages alone from then on


PATIENCE_S = 30.0
LARGE_BYTES = HEADER_BYTES + (6 << 20)
LARGE = ModelLayout(16, (Full((PoolSpec("kv", LARGE_BYTES - HEADER_BYTES),)),))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Leave cycles of references as they are, so that what is held by one shows."""
    gc.disable()
    yield
    gc.enable()


class WatchedBytes(bytearray):
    """Memory that can be referred to weakly."""


def test_a_get_that_was_given_up_holds_no_page_and_writes_nothing_when_the_server_answers_after_all(
    no_collection: None,
) -> None:
    store, goes_on, has_returned = ScriptedStorage(), threading.Event(), threading.Event()
    store.before[Method.GET] = lambda: goes_on.wait(PATIENCE_S)
    store.after[Method.GET] = has_returned.set
    kept, content = blank_page(label(1)), WatchedBytes(PAGE_BYTES)
    alive = weakref.ref(content)
    pages = [kept, PageIO(label(2), (memoryview(content),))]
    with served(store, timeout_s=0.3) as storage:
        put(open_for_contract(storage), [1, 2])
        with pytest.raises(StorageError, match="DEADLINE_EXCEEDED"):
            storage.get(pages)
        kept.buffers[0][:] = b"\x55" * len(kept.buffers[0])
        del content, pages
        assert alive() is None
        goes_on.set()
        assert has_returned.wait(PATIENCE_S)
    assert set(bytes_of(kept)) == {0x55}


def test_a_put_that_was_given_up_holds_no_page_any_more(no_collection: None) -> None:
    over = threading.Event()

    def ignore(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        over.wait(PATIENCE_S)
        return b""

    with replaced_calls() as (replaced, address):
        replaced[Call.PUT] = grpc.stream_unary_rpc_method_handler(ignore)
        storage = RemoteStorage.open(RemoteOptions((address,), timeout_s=0.5))
        storage.register(manifest_of(MODEL, LARGE), {})
        content = WatchedBytes(LARGE_BYTES)
        alive = weakref.ref(content)
        view = memoryview(content)
        with pytest.raises(StorageError, match="DEADLINE_EXCEEDED"):
            storage.put([PageIO(Label(MODEL.digest(LARGE), label(1).key, "kv"), (view,))], Level.CACHED)
        view.release()
        content.append(0)  # raises BufferError as long as anybody has a view of it
        del view, content
        assert alive() is None
        storage.close()
        over.set()


def test_a_put_of_three_mib_is_one_message_that_a_server_takes_and_a_larger_one_several() -> None:
    counts: list[int] = []

    def count(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        first, *others = messages
        counts.append(1 + len(others))
        return pb.PutReply(stored=bytes(len(put_begun(first)[0].runs[0].keys))).SerializeToString()

    layout = ModelLayout(16, (Full((PoolSpec("kv", 1024 - HEADER_BYTES),)),))
    labels = [Label(MODEL.digest(layout), number.to_bytes(32), "kv") for number in range(3500)]
    pages = [PageIO(each, (memoryview(bytes(1024)),)) for each in labels]
    with replaced_calls() as (replaced, address):
        replaced[Call.PUT] = grpc.stream_unary_rpc_method_handler(count)
        storage = RemoteStorage.open(RemoteOptions((address,)))
        storage.register(manifest_of(MODEL, layout), {})
        for some in (pages, pages[:3072]):
            assert storage.put(some, Level.CACHED) == [Answer.DECLINED] * len(some)
        storage.close()
    assert counts == [4, 1]


def test_all_calls_of_a_request_share_its_time_and_what_was_not_asked_for_is_unavailable() -> None:
    clock = ManualClock()
    store = ScriptedStorage()
    store.before[Method.GET] = lambda: clock.sleep(40.0)
    with served(store, timeout_s=100.0, clock=clock) as storage:
        assert put(open_for_contract(storage), range(20)) == [True] * 20
        answers = storage.get([blank_page(label(number)) for number in range(20)])
    hits_count = answers.count(Answer.HIT)
    assert 3 <= hits_count <= store.calls.count(Method.GET) <= 5, (
        "one may be read whose answer nobody waits for any more"
    )
    assert answers.count(Answer.UNAVAILABLE) == 20 - hits_count


@pytest.mark.parametrize("cuts", [(), (100, HEADER_BYTES, 3_000_000)], ids=["one buffer", "rows"])
def test_a_page_is_added_to_its_checksum_as_it_lands(cuts: tuple[int, ...]) -> None:
    labels = [Label(MODEL.digest(LARGE), label(number).key, "kv") for number in range(3)]
    stored = [sealed_page(each, LARGE_BYTES) for each in labels]
    found = [blank_page(each, LARGE_BYTES, cuts)._replace(checksum=PageChecksum()) for each in labels]
    with served(MemoryStorage()) as storage:
        storage.register(manifest_of(MODEL, LARGE), {})
        assert storage.put(stored, Level.CACHED) == [Answer.STORED] * 3
        assert storage.get(found) == [Answer.HIT] * 3
    for page, source in zip(found, stored, strict=True):
        assert page.checksum is not None
        assert page.checksum.of(LARGE_BYTES) == int.from_bytes(source.buffers[0][112:120], "little")
        assert verify_buffers(page.buffers, page.label, page.checksum) is None


# A server that takes connections and never answers: the client fails over, and the guard gives it the time to


TIMEOUT_S = 1.0
"""Of the client."""
GUARD = GuardConfig(deadline_s=TIMEOUT_S / 2)
"""In the proportion of the defaults: the guard's patience is half of the client's."""


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    """Two servers: one is silent, the other serves a store."""
    running = LoopbackServer.start(MemoryStorage())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}", running.address
    running.stop()


def test_all_tries_of_a_request_together_have_the_time_that_is_left_to_its_caller() -> None:
    clock = ManualClock()

    def left_s() -> float:
        call = current_call()
        assert call is not None
        with StoreStep(call, "get", clock, 3.0):
            clock.sleep(1.0)
            return RequestTime(clock, timeout_s=10.0, total_s=60.0).left_s()

    assert run_here(left_s).result() == 2.0
    assert RequestTime(clock, timeout_s=10.0, total_s=60.0).left_s() == 60.0


def test_the_defaults_are_in_that_proportion() -> None:
    assert GuardConfig().deadline_s == RemoteOptions(("a:1",)).timeout_s / 2
    assert CacheConfig((1,), (1,)).guard == GuardConfig()


@pytest.mark.parametrize("silent_first", [True, False])
def test_a_cache_opens_over_two_servers_of_which_one_is_silent(addresses: tuple[str, str], silent_first: bool) -> None:
    servers = addresses if silent_first else addresses[::-1]
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (12,), (12,), None, InlineWorkers())
    config = CacheConfig((12,), (12,), write=WritePolicy.ON_CALL, guard=GUARD)
    storage = RemoteStorage.open(RemoteOptions(servers, timeout_s=TIMEOUT_S))
    pools = list(toy.pools.values())
    toy.cache = WholePromptCache.open(toy.layout, config, pools, identity=toy.cache.identity, storage=storage)
    backup = started(toy.cache.backup(serve(toy, 4)))
    toy.cache.wait_all(20 * TIMEOUT_S)
    assert backup.state is OperationState.DONE
    toy.cache.reset()
    prefetch = started(toy.cache.prefetch(toy.cache.prompt(tokens(4))))
    toy.cache.wait_all(20 * TIMEOUT_S)
    assert prefetch.pages_count == 4
    assert toy.cache.close() == []


def test_the_guard_waits_as_long_as_the_client_says_that_a_call_may_take(addresses: tuple[str, str]) -> None:
    storage = RemoteStorage.open(RemoteOptions(addresses, timeout_s=TIMEOUT_S))
    capability = storage.capability()
    assert (capability.bounded, capability.exists_costs_io) == (True, True)
    assert capability.call_s_max == 2 * TIMEOUT_S
    guard = StorageGuard(storage, capability, GUARD)
    assert guard.deadline_s == 2 * TIMEOUT_S
    guard.close()
