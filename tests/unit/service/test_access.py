"""Access: tokens, roles, and the answer to a refused caller."""

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import grpc
import pytest

from tests.support.clock import ManualClock
from tests.support.running_service import called, refusal, running
from tests.support.service import Notes, refused
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.service import AccessSettings, Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
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
    second = given(path, "acme")  # one that is new holds at once, one that is revoked for a second at most
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
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"{path}:4"):
        given(path, "acme")
    assert path.read_bytes() == before, "the file is another's"


def test_a_file_that_another_holds_or_a_tenant_without_a_name_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.service.access.tokens._LOCK_PAUSE_S", 1e-6)
    given(path, "acme")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="found it locked"):
            given(path, "acme")
    with pytest.raises(ConfigError, match="a tenant is named by"):
        given(path, "../acme")


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
            with refused(grpc.StatusCode.UNAUTHENTICATED):
                hello(b"", timeout=10, metadata=metadata)
        reply = pb.HelloReply.FromString(called(channel, Call.HELLO, token=token))
        assert reply.tenant == "acme"
        assert token not in server.log.getvalue()
        assert server.metrics()['unified_cache_service_anomalies_total{kind="unauthenticated"}'] == 8


def test_without_tokens_and_certificates_everybody_on_this_machine_is_one_tenant_that_is_no_admin() -> None:
    with running() as server, grpc.insecure_channel(server.address) as channel:
        assert pb.HelloReply.FromString(called(channel, Call.HELLO)).tenant == "default"
        refused = refusal(channel, Call.CLEAR)
        assert refused is not None
        assert refused[0] is grpc.StatusCode.PERMISSION_DENIED
        assert refusal(channel, Call.HELLO, token="uc1_x_y") == UNAUTHENTICATED


# Revocation holds: of tokens by a command, whoever calls it, and where the file cannot be read any more


NOBODY_UID = 65534
STALE_S_MAX = 60.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")


def id_of(token: str) -> str:
    return token.split("_")[1]


@pytest.mark.threat("revoked tokens")
@as_root
def test_a_token_revoked_by_root_leaves_a_file_that_its_owner_can_read(path: Path) -> None:
    first, second = given(path, "acme"), given(path, "acme")
    os.chown(path, NOBODY_UID, NOBODY_UID)
    path.chmod(0o640)
    remove_token(path, id_of(first))
    given(path, "acme")
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (NOBODY_UID, NOBODY_UID, 0o640)
    assert id_of(second) in read_tokens(path)


@pytest.mark.threat("revoked tokens")
def test_revocations_and_new_tokens_at_the_same_time_lose_nothing(path: Path) -> None:
    tokens = [given(path, "acme") for _ in range(40)]
    kept = given(path, "acme")
    fresh = [new_token(Caller("acme", Role.READER), None, os.urandom)[1] for _ in range(10)]
    with ThreadPoolExecutor(8) as pool:
        revoked = pool.map(lambda token: remove_token(path, id_of(token)), tokens)
        added = pool.map(lambda entry: add_token(path, entry), fresh)
        assert list(revoked) == [None] * 40
        assert list(added) == [None] * 10
    assert read_tokens(path).keys() == {id_of(kept), *(entry.token_id for entry in fresh)}


def test_a_revocation_waits_for_one_under_way_and_sees_what_that_left(path: Path) -> None:
    first, second = given(path, "acme"), given(path, "acme")
    with path.open() as under_way:
        fcntl.flock(under_way, fcntl.LOCK_EX)
        waiting = Thread(target=remove_token, args=(path, id_of(second)))
        waiting.start()
        draft = path.with_name("draft")
        draft.write_text("".join(line for line in under_way if id_of(first) not in line))
        waiting.join(0.05)
        assert waiting.is_alive()
        draft.replace(path)
    waiting.join(10)
    assert read_tokens(path) == {}


def test_a_file_whose_last_line_was_left_open_takes_a_token_as_a_line_of_its_own(path: Path) -> None:
    first = given(path, "acme")
    path.write_text(path.read_text().rstrip("\n"))
    second = given(path, "acme")
    assert read_tokens(path).keys() == {id_of(first), id_of(second)}


def test_a_revocation_leaves_remarks_and_finds_a_line_that_a_person_indented(path: Path) -> None:
    token = given(path, "acme")
    path.write_text(f"# of the first cluster\n\n  {path.read_text()}")
    remove_token(path, id_of(token))
    assert path.read_text() == "# of the first cluster\n\n"


def test_a_file_of_tokens_is_no_link(path: Path, tmp_path: Path) -> None:
    token = given(tmp_path / "elsewhere", "acme")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        remove_token(path, id_of(token))
    with pytest.raises(OSError, match="symbolic links"):
        given(path, "acme")


def test_a_token_is_appended_to_a_regular_file_alone(path: Path) -> None:
    os.mkfifo(path)  # not a device: where that is not refused, it is replaced for the whole machine
    with pytest.raises(ConfigError, match="regular file"):
        given(path, "acme")
    assert path.is_fifo()


def test_no_token_is_added_to_a_file_that_others_may_write(path: Path) -> None:
    given(path, "acme")
    before = path.read_bytes()
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="kept from others"):
        given(path, "beta")
    assert path.read_bytes() == before


def spoiled(path: Path) -> None:
    path.write_text("spoiled\n")


def writable_by_others(path: Path) -> None:
    path.chmod(0o622)


@pytest.mark.threat("revoked tokens")
@pytest.mark.parametrize("damage", [spoiled, Path.unlink, writable_by_others])
def test_tokens_that_cannot_be_read_again_admit_nobody_after_a_stated_time(
    path: Path, damage: Callable[[Path], None]
) -> None:
    token, clock, anomalies = given(path, "acme"), ManualClock(), Notes()
    before = path.read_text()
    tokens = opened(path, clock, datetime.now(UTC), anomalies)
    clock.sleep(1.0)
    assert tokens.caller(token) is not None
    damage(path)
    for _ in range(int(STALE_S_MAX)):
        clock.sleep(1.0)
        assert tokens.caller(token) is not None
    clock.sleep(1.0)
    assert tokens.caller(token) is None
    assert anomalies.kinds == ["reload_failed"] * (int(STALE_S_MAX) + 1)
    path.unlink(missing_ok=True)
    path.write_text(before)
    path.chmod(0o600)
    clock.sleep(1.0)
    assert tokens.caller(token) is not None


def test_an_anomaly_says_for_how_long_what_was_read_still_holds(path: Path) -> None:
    given(path, "acme")
    clock, anomalies = ManualClock(), Notes()
    tokens = opened(path, clock, datetime.now(UTC), anomalies)
    spoiled(path)
    for _ in range(2):
        clock.sleep(40.0)
        tokens.caller("")
    (_, first), (_, second) = anomalies.anomalies
    assert first.endswith("what was read before holds for another 20 s")
    assert second.endswith("what was read before holds no more")


def test_a_file_that_was_made_readable_again_is_read_although_its_content_is_the_same(path: Path) -> None:
    """Of a change of mode or owner a file's modification time tells nothing."""
    token, clock, anomalies = given(path, "acme"), ManualClock(), Notes()
    tokens = opened(path, clock, datetime.now(UTC), anomalies)
    path.chmod(0o622)
    clock.sleep(1.0)
    tokens.caller(token)
    path.chmod(0o600)
    clock.sleep(1.0 + STALE_S_MAX)
    assert tokens.caller(token) is not None
    assert anomalies.kinds == ["reload_failed"]


@pytest.mark.threat("revoked tokens")
def test_a_gauge_tells_how_long_the_tokens_have_not_been_read(path: Path) -> None:
    token = given(path, "acme")
    name = 'unified_cache_service_stale_seconds{files="tokens"}'
    access = {"tokens": str(path), "stale_s_max": 1e-6}
    with running(access=access) as server, grpc.insecure_channel(server.address) as channel:
        assert server.metrics()[name] == 0
        assert refusal(channel, Call.HELLO, token=token) is None
        spoiled(path)
        assert refusal(channel, Call.HELLO, token=token) == UNAUTHENTICATED
        assert server.metrics()[name] > 0
        path.unlink()
        given(path, "acme")
        assert server.metrics()[name] == 0


def test_a_file_that_its_owner_cannot_keep_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = given(path, "acme")

    def refused(fd: int, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refused)
    with pytest.raises(ConfigError, match="by the user it belongs to"):
        remove_token(path, id_of(token))
    assert id_of(token) in read_tokens(path)
    assert list(path.parent.iterdir()) == [path]
