"""Credentials that are rotated while a client is open: it goes on with the new ones, and loses no page."""

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority, Issued
from tests.support.clock import ManualClock
from tests.support.files import put
from tests.support.running_service import RunningService, called, running
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.service import Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.tokens import add_token, new_token, remove_token
from unified_cache.storage_backends.protocol import Level, Store
from unified_cache.storage_backends.remote.credentials import ClientCredentials, CredentialFiles
from unified_cache.storage_backends.remote.server import Server
from unified_cache.storage_backends.remote.url import parse_rest
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import open_for_contract

ROTATIONS = 4
NAME = "acme/writer"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls_server(authority: Authority, tmp_path: Path) -> Iterator[RunningService]:
    """Yield a server that knows clients by certificates, and has a list of those that are revoked."""
    certificate, key = authority.issue("server").write(tmp_path, "server")
    ca, crl = tmp_path / "ca.pem", tmp_path / "revoked.pem"
    ca.write_bytes(authority.pem)
    crl.write_bytes(authority.revoked())
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(ca), "client_crl": str(crl)}
    with running(tls=tls, metrics={"listen": None}) as server:
        yield server


def options(directory: Path) -> str:
    return f"ca_file={directory / 'ca.pem'}&cert_file={directory / 'mine.pem'}&key_file={directory / 'mine.key'}"


def store_round(storage: Store, number: int) -> list[bool]:
    return put(storage, range(8 * number, 8 * number + 8), Level.CACHED)


def test_a_token_that_is_rotated_costs_no_page(tmp_path: Path) -> None:
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"

    def rotate() -> str:
        token, entry = new_token(Caller("acme", Role.WRITER), None, secrets.token_bytes)
        add_token(tokens, entry)
        mine.write_text(token, encoding="utf-8")
        return entry.token_id

    before = rotate()
    with (
        running(access={"tokens": str(tokens), "check_s": 1.0}) as server,
        closing(open_storage(f"grpc://{server.address}?token_file={mine}")) as storage,
    ):
        open_for_contract(storage)
        for number in range(ROTATIONS):
            before, last = rotate(), before
            remove_token(tokens, last)
            assert all(store_round(storage, number))


def test_a_certificate_that_is_rotated_costs_no_page_also_where_the_one_before_is_revoked(
    tls_server: RunningService, authority: Authority, tmp_path: Path
) -> None:
    issued = [authority.issue(NAME)]
    issued[0].write(tmp_path, "mine")
    with closing(open_storage(f"grpcs://{tls_server.address}?{options(tmp_path)}")) as storage:
        open_for_contract(storage)
        for number in range(ROTATIONS):
            issued.append(authority.issue(NAME))
            issued[-1].write(tmp_path, "mine")
            (tmp_path / "revoked.pem").write_bytes(authority.revoked(*issued[:-1]))
            assert all(store_round(storage, number))


def test_calls_over_connections_with_the_certificate_before_go_on_to_their_end(
    tls_server: RunningService, authority: Authority, tmp_path: Path
) -> None:
    authority.issue(NAME).write(tmp_path, "mine")
    clock = ManualClock()
    chosen = parse_rest(f"//{tls_server.address}?timeout_s=10&channels=1&{options(tmp_path)}", secure=True)
    server = Server.connect(tls_server.address, chosen, clock)
    before = server.next_connection()[0].channel
    assert server.next_connection()[0].channel is before
    authority.issue(NAME).write(tmp_path, "mine")
    after = server.next_connection()[0].channel
    for channel in (before, after):
        assert pb.HelloReply.FromString(called(channel, Call.HELLO)).tenant == "acme"
    clock.sleep(21)
    assert server.next_connection()[0].channel is after
    with pytest.raises(ValueError, match="closed"):
        called(before, Call.HELLO)
    server.close()
    with pytest.raises(ValueError, match="closed"):
        called(after, Call.HELLO)


def test_a_certificate_without_its_key_changes_nothing_until_the_key_is_there_too(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = authority.issue(NAME), authority.issue(NAME)
    certificate, key = first.write(tmp_path, "mine")
    credentials = ClientCredentials(CredentialFiles(None, None, certificate, key), secure=True)
    before = credentials.latest()
    Issued(second.chain, first.key).write(tmp_path, "mine")
    assert [credentials.latest() is before for _ in range(3)] == [True] * 3
    assert len(caplog.records) == 1
    second.write(tmp_path, "mine")
    after = credentials.latest()
    assert after is not before
    assert isinstance(after.channel, grpc.ChannelCredentials)
    Issued(first.chain, second.key).write(tmp_path, "mine")
    with pytest.raises(ConfigError, match="its key"):
        ClientCredentials(CredentialFiles(None, None, certificate, key), secure=True)
