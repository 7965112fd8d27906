"""Access: tokens, roles, and the answer to a refused caller."""

import hashlib
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.support.clock import ManualClock
from tests.support.running_service import called, refusal, running
from tests.support.service import Notes
from unified_cache.cli.main import run
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.access import AccessSettings, Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import Call
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.reloaded import Reloaded
from unified_cache.service.access.tokens import (
    TokenEntry,
    Tokens,
    add_token,
    new_token,
    read_tokens,
    remove_token,
    token_changes,
)

UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "valid credentials are needed")
NEEDS = {Call.HELLO: Role.READER, Call.REMOVE: Role.WRITER, Call.CLEAR: Role.ADMIN}


def counting() -> Callable[[int], bytes]:
    """Give bytes that differ each time."""
    seen: list[int] = []

    def draw(count: int) -> bytes:
        seen.append(count)
        return hashlib.sha512(bytes(len(seen))).digest()[:count]

    return draw


RANDOM = counting()


def given(path: Path, tenant: str, role: Role = Role.WRITER, last_day: date | None = None) -> str:
    token, entry = new_token(Caller(tenant, role), last_day, RANDOM)
    add_token(path, entry)
    return token


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def opened(path: Path, clock: ManualClock, now: datetime, anomalies: Notes) -> Tokens:
    pace = AccessSettings()
    entries: Reloaded[dict[str, TokenEntry]] = Reloaded(
        [path], partial(read_tokens, path), pace, clock, anomalies, token_changes
    )
    return Tokens(entries, now.timestamp)


@pytest.mark.threat("guessed tokens")
def test_a_token_speaks_for_its_tenant_in_its_role_and_is_nowhere_kept(path: Path) -> None:
    token = given(path, "acme", Role.READER)
    tokens = opened(path, ManualClock(), datetime.now(UTC), Notes())
    assert tokens.caller(token) == Caller("acme", Role.READER)
    assert token.split("_")[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(token.split("_")[2])) * 8 == 256


@pytest.mark.threat("guessed tokens")
def test_no_other_token_speaks_for_anybody(path: Path) -> None:
    token = given(path, "acme")
    tokens = opened(path, ManualClock(), datetime.now(UTC), Notes())
    last = "0" if token[-1] != "0" else "1"
    wrong = ["", "acme", token[:-1], token + "0", token[:-1] + last, token.upper(), f" {token}", "\udc80", "x" * 10_000]
    wrong.append(f"uc1_{'0' * 16}_{token.split('_')[2]}")
    assert [tokens.caller(each) for each in wrong] == [None] * len(wrong)


def test_a_token_expires_after_its_last_day(path: Path) -> None:
    last_day = date(2026, 11, 21)
    token = given(path, "acme", last_day=last_day)
    evening = datetime(2026, 11, 21, 23, 59, tzinfo=UTC)
    assert opened(path, ManualClock(), evening, Notes()).caller(token) is not None
    assert opened(path, ManualClock(), evening + timedelta(minutes=1), Notes()).caller(token) is None


@pytest.mark.threat("revoked tokens")
def test_tokens_come_and_go_without_a_restart(path: Path) -> None:
    first, clock = given(path, "acme"), ManualClock()
    tokens = opened(path, clock, datetime.now(UTC), Notes())
    second = given(path, "acme")
    assert tokens.caller(second) is None
    clock.sleep(1.0)
    assert tokens.caller(first) == tokens.caller(second) == Caller("acme", Role.WRITER)
    remove_token(path, first.split("_")[1])
    clock.sleep(1.0)
    assert tokens.caller(first) is None
    assert tokens.caller(second) is not None
    with pytest.raises(ConfigError, match="none of that ID"):
        remove_token(path, first.split("_")[1])


@pytest.mark.parametrize(
    "line",
    [
        "spoiled",
        f"id {'0' * 63} acme reader never",
        f"id {'0' * 64} acme king never",
        f"id {'0' * 64} ../acme reader never",
        f"id {'0' * 64} acme reader someday",
        f"id {'0' * 64} acme reader never more",
        "\x00\xff",
    ],
)
def test_a_line_that_makes_no_sense_is_named(path: Path, line: str) -> None:
    given(path, "acme")
    with path.open("a") as file:
        file.write(f"# a remark\n\n{line}\n")
    with pytest.raises(ConfigError, match=rf"{path}:4"):
        read_tokens(path)


def test_a_file_that_others_may_write_or_that_is_too_long_is_refused(path: Path) -> None:
    given(path, "acme")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="must be kept from others"):
        read_tokens(path)
    with pytest.raises(ConfigError, match="must be a file that can be read"):
        read_tokens(path.parent)
    path.chmod(0o600)
    with path.open("ab") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match="must have at most 16777216 bytes"):
        read_tokens(path)


@pytest.mark.threat("more than its role")
def test_each_role_may_do_what_those_before_it_may_and_no_more(path: Path) -> None:
    tokens = {role: given(path, "acme", role) for role in Role}
    with running(access={"tokens": str(path)}) as server, grpc.insecure_channel(server.address) as channel:
        for role, token in tokens.items():
            for call, needed in NEEDS.items():
                refused = refusal(channel, call, token=token)
                if role.includes(needed):
                    assert refused is None
                else:
                    # What a clear needs follows from its message, but no reader is asked for one.
                    least = Role.WRITER if role is Role.READER else needed
                    expected = f"{call.value} needs the role {least.value}"
                    assert refused == (grpc.StatusCode.PERMISSION_DENIED, expected)
        assert set(server.kinds) == {"permission_denied"}


@pytest.mark.threat("a stranger calls")
def test_no_wrong_expired_or_other_credential_is_let_in_and_all_learn_the_same(path: Path) -> None:
    token = given(path, "acme")
    expired = given(path, "acme", last_day=date(2020, 1, 1))
    with running(access={"tokens": str(path)}) as server, grpc.insecure_channel(server.address) as channel:
        assert refusal(channel, Call.HELLO) == UNAUTHENTICATED
        for wrong in (expired, token[:-1], "", "x" * 4_000):
            assert refusal(channel, Call.HELLO, token=wrong) == UNAUTHENTICATED
        hello: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(Call.HELLO.path)
        odd: list[tuple[tuple[str, str | bytes], ...]] = [
            (("authorization", f"Basic {token}"),),
            (("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}")),
            (("authorization-bin", token.encode()),),
        ]
        for metadata in odd:
            with pytest.raises(grpc.RpcError) as refused:
                hello(b"", timeout=10, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reply = pb.HelloReply.FromString(called(channel, Call.HELLO, token=token))
        assert reply.tenant == "acme"
        assert token not in server.log.getvalue()
        assert server.metrics()['unified_cache_service_anomalies_total{kind="unauthenticated"}'] == 8


@pytest.mark.threat("calling as another tenant")
def test_a_request_that_asserts_another_tenant_is_denied(path: Path) -> None:
    token = given(path, "acme")
    given(path, "other")
    with running(access={"tokens": str(path)}) as server, grpc.insecure_channel(server.address) as channel:
        for tenant in ("other", "nobody"):
            refused = refusal(channel, Call.HELLO, pb.HelloRequest(tenant=tenant), token)
            assert refused == (grpc.StatusCode.PERMISSION_DENIED, "the caller belongs to another tenant")
        assert refusal(channel, Call.HELLO, pb.HelloRequest(tenant="acme"), token) is None


def test_without_tokens_and_certificates_everybody_on_this_machine_is_one_tenant_that_is_no_admin() -> None:
    with running() as server, grpc.insecure_channel(server.address) as channel:
        assert pb.HelloReply.FromString(called(channel, Call.HELLO)).tenant == "default"
        refused = refusal(channel, Call.CLEAR)
        assert refused is not None
        assert refused[0] is grpc.StatusCode.PERMISSION_DENIED
        assert refusal(channel, Call.HELLO, token="uc1_x_y") == UNAUTHENTICATED


def test_the_command_makes_lists_and_revokes_tokens(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--tokens", str(path)]
    assert run(["token", "new", *file, "--tenant", "acme", "--role", "writer", "--days", "1"]) == 0
    token = capsys.readouterr().out.strip()
    assert opened(path, ManualClock(), datetime.now(UTC), Notes()).caller(token) == Caller("acme", Role.WRITER)
    assert run(["token", "list", *file]) == 0
    token_id = token.split("_")[1]
    assert capsys.readouterr().out.startswith(f"{token_id} acme writer 2")
    assert run(["token", "revoke", *file, token_id]) == 0
    assert read_tokens(path) == {}
    for wrong in (["--tenant", "Acme!"], ["--tenant", "acme", "--role", "king"]):
        assert run(["token", "new", *file, *wrong]) == 2
    assert run(["token", "revoke", *file, token_id]) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())


@pytest.mark.threat("leaked credentials")
def test_an_anomaly_says_from_where_and_nothing_of_the_token(path: Path) -> None:
    given(path, "acme")
    with running(access={"tokens": str(path)}) as server, grpc.insecure_channel(server.address) as channel:
        refusal(channel, Call.HELLO, token="uc1_secret")
        (line,) = [line for line in server.lines if line["level"] == "warning"]
        assert "127.0.0.1" in str(line["text"])
        assert "secret" not in server.log.getvalue()
