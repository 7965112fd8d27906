"""A server whose answers make no sense: each call of its client fails as a call to a store does."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat

import grpc
import pytest

from tests.support.service import LoopbackServer, limits_with
from unified_cache.core.errors import StorageError
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import Call
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.testing.storage_contract import blank_page, label, open_for_contract, sealed_page

NO_MESSAGE = b"\xff\xff\xff"
LIMITS = limits_with()

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


class StrangeHandler(grpc.GenericRpcHandler):
    """The methods of a server, one of which answers with whatever it is told to."""

    def __init__(self, handler: grpc.GenericRpcHandler) -> None:
        self._handler = handler
        self.strange: dict[str, bytes] = {}
        """By path of the method: its answer."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        answer = self.strange.get(handler_call_details.method)
        if answer is None:
            return self._handler.service(handler_call_details)
        if handler_call_details.method == Call.GET.path:
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([answer]))
        return grpc.stream_unary_rpc_method_handler(lambda requests, context: next(answer for _ in requests))


@contextmanager
def strange_server() -> Iterator[tuple[StrangeHandler, str]]:
    running = LoopbackServer.start(MemoryStorage(), LIMITS)
    strange = StrangeHandler(running.service.rpc_methods())
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((strange,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield strange, f"127.0.0.1:{port}"
    server.stop(None).wait()
    running.stop()


def outcome(ask: Callable[[RemoteStorage], object], call: Call, answer: bytes) -> object:
    with strange_server() as (strange, address):
        storage = RemoteStorage.open(RemoteOptions((address,), retries=0))
        if call is not Call.HELLO:
            open_for_contract(storage)
        strange.strange[call.path] = answer
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
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (Call.EXISTS, pb.ExistsReply(found=b"\1")),
        (Call.EXISTS, pb.ExistsReply(found=b"\1\1\1")),
        (Call.EXISTS, pb.ExistsReply(found=b"\0\0", reasons=b"\1")),
        (Call.PUT, pb.PutReply(stored=b"\1")),
        (Call.PUT, pb.PutReply(stored=b"\1\1\1")),
        (Call.PUT, pb.PutReply(stored=b"\0\0", reasons=b"\1\1\1")),
        (Call.SCAN, pb.ScanReply(runs=[pb.PageRun(identity=b"short", pool="full", keys=[b"short"])])),
        (Call.HELLO, pb.HelloReply(pages_max=0, part_bytes=0)),
    ],
    ids=str,
)
def test_an_answer_for_other_pages_than_asked_for_is_a_failure_of_the_store(
    call: Call, answer: pb.ExistsReply | pb.PutReply | pb.ScanReply | pb.HelloReply
) -> None:
    with pytest.raises(StorageError):
        outcome(ASKED[call], call, answer.SerializeToString())


@pytest.mark.threat("strange answers of a server")
def test_an_answer_without_an_end_ends_no_call_late() -> None:
    running = LoopbackServer.start(MemoryStorage(), LIMITS)

    class EndlessHandler(grpc.GenericRpcHandler):
        """A server whose gets go on with parts of nothing for as long as anybody reads them."""

        def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
            if details.method == Call.GET.path:
                return grpc.unary_stream_rpc_method_handler(lambda request, context: repeat(b""))
            return running.service.rpc_methods().service(details)

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((EndlessHandler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    storage = open_for_contract(RemoteStorage.open(RemoteOptions((f"127.0.0.1:{port}",), timeout_s=0.3, retries=0)))
    with pytest.raises(StorageError, match="DEADLINE_EXCEEDED"):
        storage.get([blank_page(label(0))])
    storage.close()
    server.stop(None).wait()
    running.stop()
