"""The whole server: what it answers besides the cache, its bounds, and how it ends."""

import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from tests.support.cluster import ServeProcess
from tests.support.raw_http2 import RawConnection
from tests.support.running_service import CALL_S, OpenPut, RunningService, called, refusal, running
from tests.support.service import refused, wait_for
from tests.support.service_settings import service_settings
from tests.unit.service.test_requests import MANIFEST, key, run
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.service import Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import SERVICE, Call
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.gate import RETRY_KEYS
from unified_cache.service.access.tokens import add_token, new_token
from unified_cache.service.limits import Limits

SERVING = health_pb2.HealthCheckResponse.SERVING
BOMB_BYTES = 200_000_000
BOMB_RSS_BYTES_MAX = 64 << 20


@pytest.fixture
def server() -> Iterator[RunningService]:
    with running(access={"local_role": "admin"}) as server:
        yield server


@pytest.fixture
def channel(server: RunningService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def running_put(server: RunningService, channel: grpc.Channel) -> OpenPut:
    """Begin a put, and wait until it runs."""
    begun = OpenPut(channel)
    wait_for(lambda: series(server, "calls_in_flight", state="running") == 1, CALL_S)
    return begun


def health_of(channel: grpc.Channel, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_S).status
    return status


def test_reflection_tells_the_service_to_a_few_at_a_time() -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stopped = Event()

    def asked() -> Iterator[object]:
        yield request
        stopped.wait(CALL_S)

    with running(limits=Limits(public_calls_max=2)) as server, grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        streams = [stub.ServerReflectionInfo(asked(), timeout=CALL_S) for _ in range(2)]
        for stream in streams:
            names = [service.name for service in next(stream).list_services_response.service]
            assert SERVICE in names
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            next(stub.ServerReflectionInfo(iter([request]), timeout=CALL_S))
        assert refusal(channel, Call.HELLO) is None
        stopped.set()
        for stream in streams:
            assert list(stream) == []
        assert next(stub.ServerReflectionInfo(iter([request]), timeout=CALL_S))
    with running(reflection=False) as server, grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            next(stub.ServerReflectionInfo(iter([request]), timeout=CALL_S))


@pytest.mark.threat("bad input")
def test_a_message_that_is_no_request_of_reflection_or_health_ends_its_call_and_keeps_nothing() -> None:
    calls_max = 2
    paths = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Health/Check")
    with running(limits=Limits(public_calls_max=calls_max)) as server, grpc.insecure_channel(server.address) as channel:
        for path in paths:
            ask: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
            for _ in range(calls_max + 1):
                with refused(grpc.StatusCode.INVALID_ARGUMENT):
                    next(ask(iter([b"\xff\xff\xff"]), timeout=CALL_S))
        assert server.service.drain(CALL_S)


@pytest.mark.threat("huge messages")
def test_a_message_of_zeros_that_arrives_small_costs_the_server_no_memory(tmp_path: Path) -> None:
    with (
        ServeProcess(variables={"STORAGE": f"file:{tmp_path / 'store'}"}) as server,
        grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip) as channel,
    ):
        memory = psutil.Process(server.child.pid).memory_info
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.EXISTS.path)
        ask(b"", CALL_S)
        before_bytes = memory().rss
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            ask(bytes(BOMB_BYTES), CALL_S)
        assert memory().rss - before_bytes < BOMB_RSS_BYTES_MAX
        ask(b"", CALL_S)


def test_a_tenant_with_as_many_calls_as_it_may_is_refused_with_a_time_to_come_back() -> None:
    with running(quota={"calls_max": 1}) as server, grpc.insecure_channel(server.address) as channel:
        under_way = running_put(server, channel)
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.HELLO.path)
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"", timeout=CALL_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hints = {str(entry.key): str(entry.value) for entry in refused.value.trailing_metadata()}
        assert [hints[key] for key in RETRY_KEYS] == ["250", "250"]
        under_way.end()
        assert refusal(channel, Call.HELLO) is None


def test_a_call_whose_turn_does_not_come_is_refused() -> None:
    limits = Limits(tenant_running_max=1, turn_s_max=0.05)
    with running(limits) as server, grpc.insecure_channel(server.address) as channel:
        under_way = running_put(server, channel)
        refused = refusal(channel, Call.HELLO)
        assert refused is not None
        assert refused[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        under_way.end()
        assert refusal(channel, Call.HELLO) is None


def test_a_drain_lets_what_is_in_flight_end_and_refuses_what_is_new(
    server: RunningService, channel: grpc.Channel
) -> None:
    under_way = running_put(server, channel)
    finished: list[bool] = []
    draining = Thread(target=lambda: finished.append(server.service.drain(CALL_S)))
    draining.start()
    while health_of(channel) == SERVING:
        pass
    while (refused := refusal(channel, Call.HELLO)) is None:
        pass
    assert refused == (grpc.StatusCode.UNAVAILABLE, "this server is draining; another may do")
    assert not finished
    assert under_way.end() is grpc.StatusCode.OK
    draining.join(CALL_S)
    assert finished == [True]


def test_a_call_that_outlasts_the_grace_is_cut_off(server: RunningService, channel: grpc.Channel) -> None:
    under_way = running_put(server, channel)
    assert not server.service.drain(0.01)
    assert under_way.end() is not grpc.StatusCode.OK


def test_an_address_in_use_is_refused_and_nothing_is_left_open(server: RunningService) -> None:
    for flags in ({"listen": server.address}, {"metrics": {"listen": f"127.0.0.1:{server.service.metrics_port}"}}):
        with pytest.raises(ConfigError), running(**flags):
            pass
    with running() as other:
        assert other.address != server.address


@pytest.mark.threat("other users of the machine")
def test_a_socket_is_for_its_owner_alone_and_has_one_server_who_goes_on_when_another_one_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "socket"
    listen = f"unix:{path}"
    with running(listen=listen):
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="found a server that holds it"), running(listen=listen):
            pass
        with grpc.insecure_channel(listen) as channel:
            assert refusal(channel, Call.HELLO) is None
    assert list(tmp_path.iterdir()) == []
    with running(listen=listen), grpc.insecure_channel(listen) as channel:
        assert refusal(channel, Call.HELLO) is None


def test_a_socket_that_a_killed_server_left_is_taken_and_one_that_another_program_listens_at_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "socket"
    listen = f"unix:{path}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="found somebody who listens there"), running(listen=listen):
            pass
        assert path.is_socket()
    (tmp_path / "socket.lock").touch()
    with running(listen=listen), grpc.insecure_channel(listen) as channel:
        assert refusal(channel, Call.HELLO) is None
    path.write_text("dear", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be listened at"), running(listen=listen):
        pass
    assert path.read_text(encoding="utf-8") == "dear"


@pytest.mark.threat("idle connections")
def test_connections_that_say_nothing_are_closed() -> None:
    with running(limits=Limits(handshake_s=0.2)) as server, grpc.insecure_channel(server.address) as channel:
        idle = [socket.create_connection(("127.0.0.1", server.service.port), timeout=CALL_S) for _ in range(100)]
        assert refusal(channel, Call.HELLO) is None
        for connection in idle:
            with connection:
                while connection.recv(4096):
                    pass


@pytest.mark.threat("open by mistake")
@pytest.mark.parametrize(("cap", "kinds"), [("1MiB", []), ("500TiB", ["cap_above_disk"])])
def test_a_cap_above_the_disk_is_said(tmp_path: Path, cap: str, kinds: list[str]) -> None:
    with running(storage=f"packed:{tmp_path / 'kv'}", storage_bytes=cap) as server:
        assert server.kinds == kinds


@pytest.mark.parametrize("cap", ["500", 1, "1MB"])
def test_a_cap_below_a_page_is_refused(cap: object) -> None:
    with pytest.raises(ConfigError, match="must be greater than or equal to 1MiB"):
        service_settings(None, {"storage_bytes": cap})


def test_insecure_is_visible_in_a_metric() -> None:
    counted = 'unified_cache_service_anomalies_total{kind="insecure"}'
    with running() as server:
        assert counted not in server.metrics()
    with running(listen="0.0.0.0:0", insecure=True) as server:
        assert server.metrics()[counted] == 1


# Admission before the first message: calls of headers alone, calls that outlive their turn, many connections


HALF_OPEN_COUNT = 500
CONNECTIONS = 4
CHECK = "/grpc.health.v1.Health/Check"
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


@pytest.mark.threat("calls without a message")
@pytest.mark.parametrize("call", [Call.HELLO, Call.EXISTS, Call.GET, Call.PUT, Call.CLEAR])
def test_calls_of_headers_alone_without_credentials_are_refused_at_once(tenants: TenantTokens, call: Call) -> None:
    with (
        running(access=tenants.access, limits=Limits(first_message_s=CALL_S)) as server,
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
@pytest.mark.parametrize(
    ("quota", "limits", "held_count"), [({"calls_max": 10}, Limits(), 10), ({}, Limits(calls_max=16), 8)]
)
def test_calls_of_headers_alone_count_in_their_tenants_quota_and_take_no_more_than_its_places(
    tenants: TenantTokens, quota: dict[str, object], limits: Limits, held_count: int
) -> None:
    with (
        running(access=tenants.access, quota=quota, limits=replace(limits, first_message_s=CALL_S)) as server,
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
        running(limits=Limits(first_message_s=0.2)) as server,
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
@pytest.mark.parametrize("path", [CHECK, REFLECTION])
def test_public_calls_of_headers_alone_shut_out_nobody(tenants: TenantTokens, path: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with (
        running(access=tenants.access, limits=Limits(first_message_s=CALL_S, public_calls_max=8)) as server,
        half_open(server, path) as connections,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert health_of(channel, SERVICE) == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        assert next(stub.ServerReflectionInfo(iter([request]), timeout=CALL_S)).list_services_response.service
        assert refusal(channel, Call.HELLO, token=tenants["quiet"]) is None
        # Each that came beyond the bound took the place of an older one.
        wait_for(lambda: still_open(connections, timeout_s=0.05) <= 8, CALL_S)


def test_health_knows_no_other_service_and_watches_are_not_served(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    with refused(grpc.StatusCode.NOT_FOUND):
        stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=CALL_S)
    with refused(grpc.StatusCode.UNIMPLEMENTED):
        next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S))


def test_a_call_that_its_client_ends_without_a_message_is_an_invalid_argument() -> None:
    with running() as server, grpc.insecure_channel(server.address) as channel:
        for call in (Call.HELLO, Call.EXISTS, Call.PUT):
            begin: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call.path)
            with refused(grpc.StatusCode.INVALID_ARGUMENT):
                begin(iter(()), timeout=CALL_S)


@pytest.mark.threat("starving other tenants")
def test_two_tenants_slow_puts_leave_a_third_its_turn(tenants: TenantTokens) -> None:
    with (
        running(Limits(turn_s_max=2.0), access=tenants.access) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        slow = [OpenPut(channel, tenants[name]) for name in ("flood", "second") for _ in range(8)]
        wait_for(lambda: series(server, "calls_in_flight", state="running") == len(slow), timeout_s=CALL_S)
        for _ in range(3):
            assert refusal(channel, Call.HELLO, token=tenants["quiet"]) is None
        assert {each.end() for each in slow} == {grpc.StatusCode.OK}


@pytest.mark.threat("idle connections")
def test_connections_beyond_their_number_are_closed_and_those_that_are_there_go_on() -> None:
    with running(limits=Limits(connections_max=20)) as server, ExitStack() as opened:
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
        running(limits=Limits(keepalive_s=0.2, keepalive_timeout_s=1.0)) as server,
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
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 20_000)))\n"
        "print(room_for_connections(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "print(room_for_connections(1 << 20), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    hard = min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=CALL_S)
    assert done.stdout.split() == ["1000", str(min(9192, hard)), str(max(hard - 8192, hard // 2)), str(hard)]
