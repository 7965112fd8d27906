"""The audit log: who asked for what, when, and the outcome."""

import json
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority, serial_of
from tests.support.clock import ManualClock
from tests.support.running_service import RunningService, called, credentials, refusal, running
from tests.unit.service.test_access import given, id_of
from tests.unit.service.test_requests import IDENTITY, MANIFEST
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.service import Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
from unified_cache.service.access.callers import AuditEntry, Caller
from unified_cache.service.access.tokens import remove_token
from unified_cache.service.operations.logs import (
    KINDS_MAX,
    LINES_AT_ONCE,
    JsonLines,
    Log,
    LogRateLimit,
    log_to,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def audited(server: RunningService) -> list[dict[str, object]]:
    """Return the audit log as far as it was written, without times."""
    lines = [line for line in server.lines if line["level"] == "audit"]
    for line in lines:
        assert line.pop("time")
        assert line.pop("level")
        if "peer" in line:
            assert str(line.pop("peer")).startswith("ipv4:127.0.0.1:")
    return lines


def entry(kind: str, tenant: str = "acme", outcome: str = "OK") -> AuditEntry:
    return AuditEntry(kind, Caller(tenant, Role.ADMIN, "none"), "ipv4:127.0.0.1:1", outcome, "")


@pytest.mark.threat("unlogged administration")
def test_hello_clear_and_drain_say_who_asked_by_which_credential_and_for_what(path: Path) -> None:
    token = given(path, "acme", Role.ADMIN)
    who = {"tenant": "acme", "role": "admin", "credential": f"token {id_of(token)}"}
    model = f"identity {IDENTITY.hex()} of model"
    with running(access={"tokens": str(path)}) as server, grpc.insecure_channel(server.address) as channel:
        called(channel, Call.HELLO, pb.HelloRequest(manifest=MANIFEST), token)
        called(channel, Call.IDENTITIES, token=token)
        called(channel, Call.CLEAR, pb.ClearRequest(identity=IDENTITY), token)
        called(channel, Call.CLEAR, token=token)
        called(channel, Call.DRAIN, token=token)
        assert audited(server) == [
            {"kind": "Hello", **who, "outcome": "OK", "about": model},
            {"kind": "Clear", **who, "outcome": "OK", "about": f"{model}: 0 pages"},
            {"kind": "Clear", **who, "outcome": "OK", "about": "every identity: 0 pages"},
            {"kind": "Drain", **who, "outcome": "OK", "about": ""},
        ]
        assert token not in server.log.getvalue()


@pytest.mark.threat("unlogged administration")
def test_whoever_is_not_admitted_or_not_permitted_is_in_the_log_whatever_was_called(path: Path) -> None:
    reader = given(path, "acme", Role.READER)
    who = {"tenant": "acme", "role": "reader", "credential": f"token {id_of(reader)}"}
    with running(access={"tokens": str(path)}) as server, grpc.insecure_channel(server.address) as channel:
        refusal(channel, Call.IDENTITIES)
        refusal(channel, Call.IDENTITIES, token="uc1_secret")
        refusal(channel, Call.DRAIN, token=reader)
        refusal(channel, Call.CLEAR, token=reader)
        assert audited(server) == [
            {"kind": "Identities", "outcome": "UNAUTHENTICATED", "about": ""},
            {"kind": "Identities", "outcome": "UNAUTHENTICATED", "about": ""},
            {"kind": "Drain", **who, "outcome": "PERMISSION_DENIED", "about": ""},
            {"kind": "Clear", **who, "outcome": "PERMISSION_DENIED", "about": ""},
        ]
        assert "secret" not in server.log.getvalue()


def test_tokens_that_come_and_go_are_in_the_log_when_the_server_learns_of_it(path: Path) -> None:
    first = given(path, "acme", Role.ADMIN)
    access = {"tokens": str(path)}
    with running(access=access) as server, grpc.insecure_channel(server.address) as channel:
        second = given(path, "other", Role.READER)
        remove_token(path, id_of(first))
        called(channel, Call.IDENTITIES, token=second)
        assert audited(server) == [
            {"kind": "token_revoked", "outcome": "OK", "about": f"{id_of(first)} of acme, admin"},
            {"kind": "token_added", "outcome": "OK", "about": f"{id_of(second)} of other, reader"},
        ]


def test_revoked_certificates_and_new_ones_of_the_server_are_in_the_log(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.issue("server").write(tmp_path, "server")
    ca, crl = tmp_path / "ca.pem", tmp_path / "crl.pem"
    ca.write_bytes(authority.pem)
    crl.write_bytes(authority.revoked())
    files = {"certificate": certificate, "key": key, "client_ca": ca, "client_crl": crl}
    issued, other = authority.issue("acme"), authority.issue("other")
    with running(tls={name: str(file) for name, file in files.items()}) as server:
        crl.write_bytes(authority.revoked(issued))
        with grpc.secure_channel(server.address, credentials(authority, other)) as channel:
            called(channel, Call.HELLO)
        authority.issue("server").write(tmp_path, "server")
        with grpc.secure_channel(server.address, credentials(authority, other)) as channel:
            called(channel, Call.HELLO)
        lines = audited(server)
    (revoked,) = [line for line in lines if line["kind"] == "certificate_revoked"]
    (hello, _) = [line for line in lines if line["kind"] == "Hello"]
    assert revoked["about"] == f"{serial_of(issued):x}"
    assert hello["credential"] == f"certificate {serial_of(other):x}"
    assert "certificate_changed" in {line["kind"] for line in lines}


def lines_in(path: Path) -> Sequence[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.threat("unlogged administration")
def test_a_file_of_its_own_is_opened_again_once_it_was_moved_away(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    with running(audit={"file": str(file)}) as server, grpc.insecure_channel(server.address) as channel:
        called(channel, Call.HELLO)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.replace(tmp_path / "audit.log.1")
        called(channel, Call.HELLO)
        called(channel, Call.HELLO)
        assert audited(server) == []
    assert len(lines_in(tmp_path / "audit.log.1")) == 1
    assert len(lines_in(file)) == 2
    with running(audit={"file": str(file)}) as server, grpc.insecure_channel(server.address) as channel:
        called(channel, Call.HELLO)
    assert len(lines_in(file)) == 3


def test_a_file_that_cannot_be_written_is_refused_at_the_start_and_an_anomaly_later(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="must be a file that can be written"), running(audit={"file": str(file)}):
        pass
    file.unlink()
    with running(audit={"file": str(file)}) as server, grpc.insecure_channel(server.address) as channel:
        file.unlink()
        file.mkdir()
        for _ in range(2):
            assert refusal(channel, Call.HELLO) is None
        file.rmdir()
        os.mkfifo(file)  # nobody reads it
        assert refusal(channel, Call.HELLO) is None
        file.unlink()
        assert refusal(channel, Call.HELLO) is None
        assert server.kinds == ["audit_failed"] * 3
    assert len(lines_in(file)) == 1


def log_on(stream: StringIO, burst: int, every_s: float, clock: ManualClock | None = None) -> Log:
    return Log(JsonLines.on(stream, lambda: 0.0), LogRateLimit(burst, every_s, clock or ManualClock()))


@pytest.mark.threat("endless labels and log lines")
def test_a_flood_of_hellos_and_refusals_is_counted_and_what_clears_or_ends_is_always_written() -> None:
    written, clock = StringIO(), ManualClock()
    log = log_on(written, 3, 1.0, clock)
    for _ in range(100):
        for each in (entry("Hello"), entry("Stats", outcome="PERMISSION_DENIED"), entry("Clear"), entry("Drain")):
            assert log.audited(each)
    log.audited(entry("Hello", tenant="other"))
    clock.sleep(1.0)
    log.audited(entry("Hello"))
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    counts = {kind: sum(line["kind"] == kind for line in lines) for kind in ("Hello", "Stats", "Clear", "Drain")}
    assert counts == {"Hello": 5, "Stats": 3, "Clear": 100, "Drain": 100}
    assert lines[-1]["left_out"] == 97
    assert lines[-2]["tenant"] == "other"


# Logs: one line of JSON for each anomaly, and of one kind not too many


@pytest.fixture
def kept_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def lines(stream: StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_anomaly_is_one_line_of_json_whatever_its_text() -> None:
    stream = StringIO()
    log = log_on(stream, 5, 1.0)
    log.anomaly("odd", 'a "quoted"\nsecond line\u2028\x00')
    assert stream.getvalue().isascii()
    (line,) = lines(stream)
    assert line == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "level": "warning",
        "kind": "odd",
        "text": 'a "quoted"\nsecond line\u2028\x00',
    }


def test_beyond_a_burst_one_line_of_a_kind_passes_now_and_then_and_says_how_many_did_not() -> None:
    stream, clock = StringIO(), ManualClock()
    log = log_on(stream, 2, 10.0, clock)
    for _ in range(100):
        log.anomaly("flood", "x")
    log.anomaly("other", "y")
    assert [line["kind"] for line in lines(stream)] == ["flood", "flood", "other"]
    clock.sleep(10.0)
    log.anomaly("flood", "z")
    log.anomaly("flood", "z")
    assert lines(stream)[-1]["left_out"] == 98
    assert len(lines(stream)) == 4


@pytest.mark.threat("endless labels and log lines")
def test_kinds_are_few_and_lines_are_short() -> None:
    stream = StringIO()
    log = log_on(stream, 1, 10.0)
    for number in range(KINDS_MAX * 2):
        log.anomaly(f"kind {number}", "x" * 1_000_000)
    assert len(lines(stream)) == KINDS_MAX + 1
    assert len(stream.getvalue()) < KINDS_MAX * 4_000


def test_a_kind_that_had_no_line_for_long_gives_its_place_to_a_new_one() -> None:
    stream, clock = StringIO(), ManualClock()
    log = log_on(stream, 1, 10.0, clock)
    for first in (0, KINDS_MAX):
        for number in range(first, first + KINDS_MAX):
            log.anomaly(f"kind {number}", "x")
        clock.sleep(10.0)
    assert len(lines(stream)) == 2 * KINDS_MAX


def test_a_stream_that_is_gone_stops_nobody() -> None:
    stream = StringIO()
    log = log_on(stream, 1, 10.0)
    stream.close()
    log.anomaly("odd", "x")
    log.event("stopped", "x")


@pytest.mark.usefixtures("kept_logging")
def test_what_libraries_warn_of_is_in_the_log_with_its_traceback_and_paced() -> None:
    stream = StringIO()
    log_to(stream)
    logger = logging.getLogger("grpc._server")
    for _ in range(50):
        try:
            raise ValueError("spoiled")
        except ValueError:
            logger.exception("Exception calling application")
    logger.info("quiet")
    found = lines(stream)
    assert [line["kind"] for line in found] == ["log.grpc._server"] * LINES_AT_ONCE
    assert "spoiled" in str(found[0]["text"])
