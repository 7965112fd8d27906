"""Admission before the first message: calls of headers alone, calls that outlive their turn, many connections."""

import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from tests.support.raw_http2 import RawConnection
from tests.support.running_service import CALL_S, RunningService, called, refusal, running
from tests.support.service import wait_for
from tests.unit.service.test_requests import MANIFEST, key, run
from unified_cache.core.settings.access import Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import SERVICE, Call
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.tokens import add_token, new_token

HALF_OPEN_COUNT = 500
CONNECTIONS = 4
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class TenantTokens:
    """Tokens of tenants, made as they are asked for before the server starts."""

    def __init__(self, path: Path, *names: str) -> None:
        self.access = {"tokens": str(path)}
        self.tokens: dict[str, str] = {}
        for name in names:
            self.tokens[name], entry = new_token(Caller(name, Role.WRITER), None, secrets.token_bytes)
            add_token(path, entry)

    def __getitem__(self, name: str) -> str:
        return self.tokens[name]


@pytest.fixture
def tenants(tmp_path: Path) -> TenantTokens:
    return TenantTokens(tmp_path / "tokens", "flood", "second", "quiet")


@contextmanager
def half_open(server: RunningService, *paths: str, token: str = "") -> Iterator[list[RawConnection]]:
    """Send headers of ``HALF_OPEN_COUNT`` calls and no message."""
    with ExitStack() as opened:
        connections = [RawConnection(server.service.port) for _ in range(CONNECTIONS)]
        for number, connection in enumerate(connections):
            opened.callback(connection.close)
            connection.begin(paths[number % len(paths)], HALF_OPEN_COUNT // CONNECTIONS, token)
        yield connections


def still_open(connections: list[RawConnection], calls_max: int = 0, timeout_s: float = CALL_S) -> int:
    """Wait until no more than so many calls of each connection are open; return how many are in all."""
    return sum(connection.wait_until_open(calls_max, timeout_s) for connection in connections)


def series(server: RunningService, name: str, **labels: str) -> float:
    """Sum the series of a metric that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = server.metrics().items()
    return sum(value for text, value in found if name in text and all(each in text for each in wanted))


def health_of(channel: grpc.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_S).status)


@pytest.mark.threat("calls without a message")
@pytest.mark.parametrize("call", [Call.HELLO, Call.EXISTS, Call.GET, Call.PUT, Call.CLEAR])
def test_calls_of_headers_alone_without_credentials_are_refused_at_once(tenants: TenantTokens, call: Call) -> None:
    with (
        running(access=tenants.access, limits={"first_message_s": CALL_S}) as server,
        half_open(server, call.path) as connections,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert refusal(channel, Call.HELLO, token=tenants["quiet"]) is None
        assert still_open(connections) == 0
        assert series(server, "calls_total", method=call.value, code="UNAUTHENTICATED") == HALF_OPEN_COUNT
        assert series(server, "anomalies_total", kind="unauthenticated") == HALF_OPEN_COUNT
        assert "unauthenticated" in server.kinds
        assert refusal(channel, Call.HELLO, token=tenants["quiet"]) is None


@pytest.mark.threat("calls without a message")
@pytest.mark.parametrize(("quota", "limits", "held_count"), [({"calls_max": 10}, {}, 10), ({}, {"calls_max": 16}, 8)])
def test_calls_of_headers_alone_count_in_their_tenants_quota_and_take_no_more_than_its_places(
    tenants: TenantTokens, quota: dict[str, object], limits: dict[str, object], held_count: int
) -> None:
    with (
        running(access=tenants.access, quota=quota, limits={"first_message_s": CALL_S, **limits}) as server,
        half_open(server, Call.HELLO.path, Call.GET.path, token=tenants["flood"]) as connections,
        grpc.insecure_channel(server.address) as channel,
    ):
        wait_for(
            lambda: series(server, "calls_total", code="RESOURCE_EXHAUSTED") == HALF_OPEN_COUNT - held_count, CALL_S
        )
        assert series(server, "calls_in_flight", tenant="flood", state="half_open") == held_count
        assert refusal(channel, Call.HELLO, token=tenants["quiet"]) is None
        for connection in connections:
            connection.close()
        wait_for(lambda: series(server, "calls_in_flight", tenant="flood") == 0)
        assert refusal(channel, Call.HELLO, token=tenants["flood"]) is None


@pytest.mark.threat("calls without a message")
def test_a_call_without_a_message_is_cut_off_in_time_and_the_log_says_so() -> None:
    with (
        running(limits={"first_message_s": 0.2}) as server,
        closing(RawConnection(server.service.port)) as connection,
    ):
        connection.begin(Call.HELLO.path, 1)
        connection.begin(Call.GET.path, 1)
        assert connection.wait_until_open(0, CALL_S) == 0
        wait_for(lambda: series(server, "calls_total", code="CANCELLED") == 2)
        lines = [line for line in server.lines if line["level"] == "warning"]
        assert {line["kind"] for line in lines} == {"cut_off"}
        assert {line["text"] for line in lines} == {
            f"{call.value} by default: no message in 0.2 s" for call in (Call.HELLO, Call.GET)
        }


@pytest.mark.threat("calls without a message")
@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECTION])
def test_public_calls_of_headers_alone_shut_out_nobody(tenants: TenantTokens, path: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with (
        running(access=tenants.access, limits={"first_message_s": CALL_S, "public_calls_max": 8}) as server,
        half_open(server, path) as connections,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        assert next(stub.ServerReflectionInfo(iter([request]), timeout=CALL_S)).list_services_response.service
        assert refusal(channel, Call.HELLO, token=tenants["quiet"]) is None
        # Each that came beyond the bound took the place of an older one.
        wait_for(lambda: still_open(connections, timeout_s=0.05) <= 8, CALL_S)
        watched.cancel()


def test_a_watch_of_health_is_told_of_the_drain_and_of_unknown_services() -> None:
    replies = health_pb2.HealthCheckResponse
    with running() as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        known = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=CALL_S)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nothing"), timeout=CALL_S)
        assert [next(known).status, next(unknown).status] == [replies.SERVING, replies.SERVICE_UNKNOWN]
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=CALL_S)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert server.service.drain(CALL_S)
        assert next(known).status == replies.NOT_SERVING


def test_a_call_that_its_client_ends_without_a_message_is_an_invalid_argument() -> None:
    with running() as server, grpc.insecure_channel(server.address) as channel:
        for call in (Call.HELLO, Call.EXISTS, Call.PUT):
            begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call.path)
            with pytest.raises(grpc.RpcError) as refused:
                begin(iter(()), timeout=CALL_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.threat("starving other tenants")
def test_two_tenants_slow_puts_leave_a_third_its_turn(tenants: TenantTokens) -> None:
    stopped = Event()

    def messages() -> Iterator[bytes]:
        yield pb.PutPart(start=pb.PutStart()).SerializeToString()
        stopped.wait(CALL_S)

    quota = {"turn_s_max": 2.0}
    with (
        running(access=tenants.access, quota=quota) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        put: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(Call.PUT.path)
        slow = [
            put.future(messages(), timeout=CALL_S, metadata=(("authorization", f"Bearer {tenants[name]}"),))
            for name in ("flood", "second")
            for _ in range(8)
        ]
        wait_for(lambda: series(server, "calls_in_flight", state="running") == len(slow), timeout_s=CALL_S)
        for _ in range(3):
            assert refusal(channel, Call.HELLO, token=tenants["quiet"]) is None
        stopped.set()
        assert {each.code() for each in slow} == {grpc.StatusCode.OK}


@pytest.mark.threat("idle connections")
def test_connections_beyond_their_number_are_closed_and_those_that_are_there_go_on() -> None:
    with running(limits={"connections_max": 20}) as server, ExitStack() as opened:
        channel = opened.enter_context(grpc.insecure_channel(server.address))
        called(channel, Call.HELLO)
        connections = [RawConnection(server.service.port) for _ in range(40)]
        for connection in connections:
            opened.callback(connection.close)
            connection.open.add(0)  # no call: it goes with its connection
        wait_for(lambda: sum(not connection.wait_until_open(0, 0.01) for connection in connections) == 21)
        called(channel, Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
        called(channel, Call.EXISTS, pb.ExistsRequest(runs=[run(key(0))]))
        for connection in connections:
            connection.close()
        wait_for(lambda: _is_answered(server.address))


def _is_answered(address: str) -> bool:
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        return refusal(channel, Call.HELLO) is None


@pytest.mark.threat("idle connections")
def test_a_client_that_is_gone_is_noticed_by_its_silence() -> None:
    with (
        running(limits={"keepalive_s": 0.2, "keepalive_timeout_s": 1.0}) as server,
        closing(RawConnection(server.service.port)) as there,
        closing(RawConnection(server.service.port, answers_pings=False)) as gone,
    ):
        for connection in (there, gone):
            connection.open.add(0)  # no call: it goes with its connection
        wait_for(lambda: there.wait_until_open(0, 0.01) + gone.wait_until_open(0, 0.01) == 1, CALL_S)
        assert there.open


@pytest.mark.threat("idle connections")
def test_the_limit_of_descriptors_is_raised_as_far_as_connections_need() -> None:
    asked = (
        "import resource\n"
        "from unified_cache.service.operations.process import room_for_connections\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 4096)))\n"
        "print(room_for_connections(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "print(room_for_connections(1 << 20), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=CALL_S)
    assert done.stdout.split() == ["1000", "1512", str(hard - 512), str(hard)]
