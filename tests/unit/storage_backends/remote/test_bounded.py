"""The client's calls end by themselves, and leave the caller's pages alone from then on."""

import gc
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.support.cache import ToyEngine, WholePromptCache, toy_layout
from tests.support.clock import ManualClock
from tests.support.operations import PAGE, serve, started, tokens
from tests.support.service import LoopbackServer, limits_with
from unified_cache.components import Full
from unified_cache.controller import InlineWorkers, OperationState
from unified_cache.core.config import CacheConfig, GuardConfig, WritePolicy
from unified_cache.core.errors import StorageError
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, PageChecksum, verify_buffers
from unified_cache.core.window import SPAN_ALL
from unified_cache.proto.wire.calls import Call
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.remote.store import GatedMessages, RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.testing.storage_contract import MODEL, blank_page, bytes_of, label, open_for_contract, sealed_page

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


class PausedReads(MemoryStorage):
    """A store that returns from a get when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.has_returned = threading.Event()

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        assert self.goes_on.wait(PATIENCE_S)
        hits = super().get(pages)
        self.has_returned.set()
        return hits


def test_a_get_that_was_given_up_writes_nothing_when_the_server_answers_after_all() -> None:
    store = PausedReads()
    running = LoopbackServer.start(store)
    storage = open_for_contract(RemoteStorage.open(RemoteOptions((running.address,), timeout_s=0.3, retries=0)))
    storage.put([sealed_page(label(1))], Level.CACHED)
    page = blank_page(label(1))
    with pytest.raises(StorageError, match="DEADLINE_EXCEEDED"):
        storage.get([page])
    page.buffers[0][:] = b"\x55" * len(page.buffers[0])
    store.goes_on.set()
    assert store.has_returned.wait(PATIENCE_S)
    storage.close()
    running.stop()
    assert set(bytes_of(page)) == {0x55}


def test_a_get_that_was_given_up_holds_no_page_any_more(no_collection: None) -> None:
    store = PausedReads()
    running = LoopbackServer.start(store)
    storage = open_for_contract(RemoteStorage.open(RemoteOptions((running.address,), timeout_s=0.3, retries=0)))
    content = WatchedBytes(sum(map(len, blank_page(label(1)).buffers)))
    alive = weakref.ref(content)
    pages = [PageIO(label(1), None, (memoryview(content),))]
    with pytest.raises(StorageError, match="DEADLINE_EXCEEDED"):
        storage.get(pages)
    del content, pages
    assert alive() is None
    store.goes_on.set()
    storage.close()
    running.stop()


class DeafHandler(grpc.GenericRpcHandler):
    """A server that takes no message of any put."""

    def __init__(self, handler: grpc.GenericRpcHandler) -> None:
        self._handler = handler
        self.over = threading.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        if handler_call_details.method == Call.PUT.path:
            return grpc.stream_unary_rpc_method_handler(self._ignore)
        return self._handler.service(handler_call_details)

    def _ignore(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self.over.wait(PATIENCE_S)
        return b""


def test_a_put_that_was_given_up_holds_no_page_any_more(no_collection: None) -> None:
    limits = limits_with()
    running = LoopbackServer.start(MemoryStorage(), limits)
    deaf = DeafHandler(running.service.rpc_methods())
    server = grpc.server(ThreadPoolExecutor(4), options=limits.channel_options())
    server.add_generic_rpc_handlers((deaf,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    storage = RemoteStorage.open(RemoteOptions((f"127.0.0.1:{port}",), timeout_s=0.5, retries=0))
    storage.register(manifest_of(MODEL, LARGE), {})
    label_of_large = Label(MODEL.digest(LARGE), label(1).key, "kv")
    content = WatchedBytes(LARGE_BYTES)
    alive = weakref.ref(content)
    view = memoryview(content)
    with pytest.raises(StorageError, match="DEADLINE_EXCEEDED"):
        storage.put([PageIO(label_of_large, None, (view,))], Level.CACHED)
    view.release()
    content.append(0)  # raises BufferError as long as anybody has a view of it
    del view, content
    assert alive() is None
    storage.close()
    deaf.over.set()
    server.stop(None).wait()
    running.stop()


def test_what_a_put_sends_is_over_once_it_is_closed() -> None:
    content = bytearray(4)

    def made() -> Iterator[bytes]:
        view = memoryview(content)
        for byte in view:
            yield bytes([byte])

    generator = made()
    messages = GatedMessages(generator)  # type: ignore[arg-type]
    assert next(messages) == b"\0"
    messages.close()
    messages.close()
    assert list(messages) == []
    content.append(0)


class ClockedReads(MemoryStorage):
    """A store whose every get takes as long as a clock says that nobody waits for."""

    def __init__(self, clock: ManualClock, get_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._get_s = get_s
        self.gets_count = 0

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.gets_count += 1
        self._clock.sleep(self._get_s)
        return super().get(pages)


def test_all_calls_of_a_request_share_its_time_and_what_was_not_asked_for_is_unavailable() -> None:
    clock = ManualClock()
    store = ClockedReads(clock, 40.0)
    running = LoopbackServer.start(store, limits_with(pages_max=1))
    options = RemoteOptions((running.address,), timeout_s=100.0, retries=0)
    storage = open_for_contract(RemoteStorage.open(options, clock, lambda _: None))
    for number in range(20):
        assert storage.put([sealed_page(label(number))], Level.CACHED) == [Answer.STORED]
    answers = storage.get([blank_page(label(number)) for number in range(20)])
    hits = answers.count(Answer.HIT)
    assert 3 <= hits <= store.gets_count <= 5, "the store may be asked for one whose answer nobody waits for any more"
    assert answers.count(Answer.UNAVAILABLE) == 20 - hits
    storage.close()
    running.stop()


@pytest.mark.parametrize("cuts", [(), (100, HEADER_BYTES, 3_000_000)], ids=["one buffer", "rows"])
def test_a_page_is_added_to_its_checksum_as_it_lands(cuts: tuple[int, ...]) -> None:
    running = LoopbackServer.start(MemoryStorage())
    storage = running.client()
    storage.register(manifest_of(MODEL, LARGE), {})
    labels = [Label(MODEL.digest(LARGE), label(number).key, "kv") for number in range(3)]
    stored = [sealed_page(each, LARGE_BYTES) for each in labels]
    assert storage.put(stored, Level.CACHED) == [Answer.STORED] * 3
    found = [blank_page(each, LARGE_BYTES, cuts)._replace(checksum=PageChecksum()) for each in labels]
    assert storage.get(found) == [Answer.HIT] * 3
    for page, source in zip(found, stored, strict=True):
        assert page.checksum is not None
        assert page.checksum.of(LARGE_BYTES) == int.from_bytes(source.buffers[0][112:120], "little")
        assert verify_buffers(page.buffers, page.label, page.checksum) is None
    storage.close()
    running.stop()


def test_the_client_says_that_it_is_bounded() -> None:
    running = LoopbackServer.start(MemoryStorage())
    storage = running.client(timeout_s=3.0)
    capability = storage.capability()
    assert (capability.bounded, capability.exists_costs_io) == (True, True)
    assert capability.call_s_max >= 2 * 3.0
    storage.close()
    running.stop()


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
    storage = RemoteStorage.open(RemoteOptions(addresses, timeout_s=TIMEOUT_S, retries=0))
    capability = storage.capability()
    assert capability.call_s_max == 2 * TIMEOUT_S
    guard = StorageGuard(storage, capability, GUARD)
    assert guard.deadline_s == 2 * TIMEOUT_S
    guard.close()
