"""Certificates: who is let in, whom they name, and that they change without a restart."""

import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from tests.support.certificates import Authority, Issued
from tests.support.clock import ManualClock
from tests.support.running_service import CALL_S, RunningService, called, credentials, refusal, running
from tests.support.service import Notes
from tests.unit.service.test_access import UNAUTHENTICATED, given
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.service import AccessSettings, Role, TlsSettings
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.reloaded import Reloaded
from unified_cache.service.access.tls import CertifiedClients, read_certificates, read_trust, trust_changes

DOMAIN = "cluster.example"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> dict[str, str]:
    certificate, key = authority.issue("server").write(tmp_path, "server")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.pem)
    return {"certificate": str(certificate), "key": str(key), "client_ca": str(ca)}


@pytest.fixture
def server(tls: dict[str, str]) -> Iterator[RunningService]:
    with running(tls=tls) as server:
        yield server


def hello(server: RunningService, channel_credentials: grpc.ChannelCredentials) -> pb.HelloReply:
    with grpc.secure_channel(server.address, channel_credentials) as channel:
        return pb.HelloReply.FromString(called(channel, Call.HELLO))


def refused(
    server: RunningService, shown: grpc.ChannelCredentials, call: Call = Call.HELLO, token: str | None = None
) -> grpc.StatusCode | None:
    """Make a call over a connection of its own; return the status that refuses it, None where it was answered."""
    with grpc.secure_channel(server.address, shown) as channel:
        found = refusal(channel, call, token=token)
    return None if found is None else found[0]


def test_the_tenant_is_the_common_name_of_the_certificate(authority: Authority, server: RunningService) -> None:
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"
    assert refused(server, credentials(authority, authority.issue("acme/admin")), Call.CLEAR) is None
    reader = credentials(authority, authority.issue("acme"))
    assert refused(server, reader, Call.REMOVE) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("name", ["", "Acme", "../x", "acme/king", "acme/admin/more", "/admin", ".acme", "a b"])
def test_a_name_that_is_no_tenant_is_nobody(authority: Authority, server: RunningService, name: str) -> None:
    issued = authority.issue(name or " ", uris=("spiffe://cluster.example/unified-cache/acme/admin",))
    assert refused(server, credentials(authority, issued)) is grpc.StatusCode.UNAUTHENTICATED


def test_with_a_trust_domain_the_tenant_is_a_spiffe_id_of_it_and_nothing_else(
    authority: Authority, tls: dict[str, str]
) -> None:
    good = f"spiffe://{DOMAIN}/unified-cache/acme/writer"
    with running(tls={**tls, "trust_domain": DOMAIN}) as server:
        issued = authority.issue("other/admin", uris=(good,))
        assert hello(server, credentials(authority, issued)).tenant == "acme"
        for uris in (
            (),
            (good.replace(DOMAIN, "evil.example"),),
            (good.replace("unified-cache", "billing"),),
            (good.removesuffix("/writer"),),
            (good + "/more",),
            (good.replace("acme", "a%2fb"),),
            (good, good.replace("acme", "other")),
            (good.replace("spiffe", "https"),),
        ):
            issued = authority.issue("other/admin", uris=uris)
            # Of two SPIFFE IDs gRPC itself thinks as little.
            expected = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)
            assert refused(server, credentials(authority, issued)) in expected, uris


@pytest.mark.threat("a stranger calls")
def test_nobody_without_a_certificate_of_the_authority_gets_through_the_handshake(
    authority: Authority, server: RunningService
) -> None:
    foreign = Authority("foreign")
    for issued in (None, foreign.issue("acme"), authority.issue("acme", days=-1)):
        assert refused(server, credentials(authority, issued)) is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(server.address) as channel:
        assert (refusal(channel, Call.HELLO) or [None])[0] is grpc.StatusCode.UNAVAILABLE
    assert server.kinds == []
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"


def test_health_needs_the_handshake_and_no_tenant(authority: Authority, server: RunningService) -> None:
    with grpc.secure_channel(server.address, credentials(authority, authority.issue("No Tenant"))) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_token_over_a_certificate_says_who_calls_and_a_wrong_one_is_not_made_up_for(
    authority: Authority, server: RunningService
) -> None:
    certified = credentials(authority, authority.issue("acme"))
    assert refused(server, certified, token="uc1_wrong") is grpc.StatusCode.UNAUTHENTICATED


def test_a_new_certificate_and_a_new_authority_hold_without_a_restart(
    authority: Authority, server: RunningService, tls: dict[str, str], tmp_path: Path
) -> None:
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"
    later = Authority("later")
    later.issue("server").write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(later.pem)
    assert hello(server, credentials(later, later.issue("new"))).tenant == "new"
    assert refused(server, credentials(later, authority.issue("acme"))) is not None


def test_spoiled_files_keep_the_certificates_there_were(
    authority: Authority, server: RunningService, tmp_path: Path
) -> None:
    (tmp_path / "server.pem").write_bytes(b"spoiled")
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"
    authority.issue("server").write(tmp_path, "server")
    authority.issue("another").write(tmp_path, "another")
    (tmp_path / "another.key").replace(tmp_path / "server.key")
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"
    assert set(server.kinds) == {"reload_failed"}


def test_files_that_make_no_sense_are_refused_at_the_start(
    authority: Authority, tls: dict[str, str], tmp_path: Path
) -> None:
    settings = TlsSettings.model_validate(tls)
    key = tmp_path / "server.key"
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="kept from others"):
        read_certificates(settings)
    key.write_bytes(authority.issue("another").key)
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="must be the key of"):
        read_certificates(settings)
    key.write_bytes(b"spoiled")
    with pytest.raises(ConfigError, match="must hold a private key"):
        read_certificates(settings)
    with pytest.raises(ConfigError, match="must hold certificates"):
        read_certificates(settings.model_copy(update={"certificate": key}))
    with pytest.raises(ConfigError, match="must hold certificates"):
        read_trust(settings.model_copy(update={"client_ca": key}), time.time)
    with pytest.raises(ConfigError, match="must be a file"):
        read_certificates(settings.model_copy(update={"key": tmp_path / "none"}))


def scraped(server: RunningService, context: ssl.SSLContext, token: str | None = None) -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = Request(f"https://127.0.0.1:{server.service.metrics_port}/metrics", headers=headers)
    with urlopen(request, timeout=CALL_S, context=context) as answer:
        return str(answer.read().decode())


def scrape_status(server: RunningService, context: ssl.SSLContext, token: str | None = None) -> int:
    """Return the status that a reader of the metrics is refused with."""
    with pytest.raises(HTTPError) as failed:
        scraped(server, context, token)
    failed.value.close()
    return int(failed.value.code)


def trusting(authority: Authority, client: Issued | None, directory: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if client is not None:
        context.load_cert_chain(*client.write(directory, "client"))
    return context


def test_metrics_are_read_over_the_same_tls(authority: Authority, server: RunningService, tmp_path: Path) -> None:
    with pytest.raises((URLError, ssl.SSLError, ConnectionError)):
        scraped(server, trusting(authority, None, tmp_path))
    context = trusting(authority, authority.issue("prometheus/admin"), tmp_path)
    lines = scraped(server, context).splitlines()
    (expiry,) = [
        line for line in lines if line.startswith('unified_cache_service_expiry_timestamp_seconds{files="certificate"}')
    ]
    assert float(expiry.split()[1]) > 1.7e9
    later = Authority("later")
    later.issue("server").write(tmp_path, "server")
    context.load_verify_locations(cadata=later.pem.decode())
    assert scraped(server, context)


@pytest.mark.threat("reading metrics")
@pytest.mark.parametrize("name", ["acme", "acme/writer", "No Tenant"])
def test_the_certificate_of_a_tenant_reads_no_metrics(
    authority: Authority, server: RunningService, name: str, tmp_path: Path
) -> None:
    assert scrape_status(server, trusting(authority, authority.issue(name), tmp_path)) == 403


@pytest.mark.threat("reading metrics")
def test_an_authority_of_the_metrics_vouches_for_their_readers_and_for_no_tenant(
    authority: Authority, tls: dict[str, str], tmp_path: Path
) -> None:
    readers = Authority("readers")
    (tmp_path / "readers.pem").write_bytes(readers.pem)
    metrics = {"listen": "127.0.0.1:0", "client_ca": str(tmp_path / "readers.pem")}
    with running(tls=tls, metrics=metrics) as server:
        assert scraped(server, trusting(authority, readers.issue("prometheus"), tmp_path))
        with pytest.raises((URLError, ssl.SSLError, ConnectionError)):
            scraped(server, trusting(authority, authority.issue("acme/admin"), tmp_path))
        assert refused(server, credentials(authority, readers.issue("acme"))) is not None


@pytest.mark.threat("reading metrics")
def test_the_token_of_an_admin_alone_reads_metrics_without_a_certificate(
    authority: Authority, tls: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    admin, reader = given(path, "acme", Role.ADMIN), given(path, "acme")
    with running(tls=tls, access={"tokens": str(path)}) as server:
        context = trusting(authority, None, tmp_path)
        assert "unified_cache_service_stored_bytes" in scraped(server, context, admin)
        assert [scrape_status(server, context, token) for token in (reader, "wrong", None)] == [403, 401, 401]
        certified = trusting(authority, authority.issue("prometheus/admin"), tmp_path)
        assert scraped(server, certified)


# Revoked certificates: lists of them hold on open connections, and no longer than they can be read


@pytest.fixture
def revocable(authority: Authority, tls: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Add a list of revocations, which is empty."""
    (tmp_path / "crl.pem").write_bytes(authority.revoked())
    return {**tls, "client_crl": str(tmp_path / "crl.pem")}


@pytest.mark.threat("revoked certificates")
def test_a_revoked_certificate_is_refused_on_a_connection_that_is_open_already(
    authority: Authority, revocable: dict[str, str], tmp_path: Path
) -> None:
    issued, other = authority.issue("acme"), authority.issue("acme")
    path = tmp_path / "tokens"
    token = given(path, "acme")
    with (
        running(tls=revocable, access={"tokens": str(path)}) as server,
        grpc.secure_channel(server.address, credentials(authority, issued)) as channel,
        grpc.secure_channel(server.address, credentials(authority, other)) as others,
    ):
        assert refusal(channel, Call.HELLO) is None
        (tmp_path / "crl.pem").write_bytes(authority.revoked(issued))
        assert refusal(channel, Call.HELLO) == UNAUTHENTICATED
        assert refusal(channel, Call.HELLO, token=token) == UNAUTHENTICATED
        assert refusal(others, Call.HELLO) is None
        assert refusal(others, Call.HELLO, token=token) is None
        assert "revoked" in server.kinds


def test_a_revoked_certificate_reads_no_metrics(
    authority: Authority, revocable: dict[str, str], tmp_path: Path
) -> None:
    admin = authority.issue("prometheus/admin")
    context = trusting(authority, admin, tmp_path)
    with running(tls=revocable) as server:
        assert scraped(server, context)
        (tmp_path / "crl.pem").write_bytes(authority.revoked(admin))
        assert scrape_status(server, context) == 403


@pytest.mark.threat("revoked certificates")
def test_lists_of_revocations_that_prove_nothing_are_refused_at_the_start(
    authority: Authority, revocable: dict[str, str], tmp_path: Path
) -> None:
    foreign = Authority("foreign")
    same_name = Authority()
    for content, reason in (
        (b"spoiled", "must hold revocation lists"),
        (authority.pem, "must hold revocation lists"),
        (authority.revoked() + foreign.revoked(), "list 2 of .* must be signed by an authority"),
        (same_name.revoked(), "must be signed by an authority"),
        (authority.revoked(hours=-1), "not over yet"),
        (authority.revoked(is_delta=True), "must be a whole list"),
    ):
        (tmp_path / "crl.pem").write_bytes(content)
        with pytest.raises(ConfigError, match=reason), running(tls=revocable):
            pass


@pytest.mark.threat("revoked certificates")
def test_client_certificates_hold_no_longer_than_their_authorities_and_lists_can_be_read(
    authority: Authority, revocable: dict[str, str], tmp_path: Path
) -> None:
    issued = authority.issue("acme")
    for damaged in ("ca.pem", "crl.pem"):
        file = tmp_path / damaged
        before = file.read_bytes()
        with (
            running(tls=revocable, access={"stale_s_max": 1e-6}) as server,
            grpc.secure_channel(server.address, credentials(authority, issued)) as channel,
        ):
            assert refusal(channel, Call.HELLO) is None
            file.write_bytes(b"spoiled")
            assert refusal(channel, Call.HELLO) == UNAUTHENTICATED
            file.write_bytes(before)
            assert refusal(channel, Call.HELLO) is None
            assert {"reload_failed", "unauthenticated"} == set(server.kinds)


@pytest.mark.threat("revoked certificates")
def test_a_list_of_revocations_that_is_over_admits_nobody(authority: Authority, revocable: dict[str, str]) -> None:
    clock, anomalies = ManualClock(time.time()), Notes()
    settings = TlsSettings.model_validate(revocable)
    trust = Reloaded([], partial(read_trust, settings, clock), AccessSettings(), clock, anomalies, trust_changes)
    clients = CertifiedClients(trust, None, Role.READER, clock, anomalies)
    certificate = authority.issue("acme").chain
    assert clients.named(certificate) == Caller("acme", Role.READER)
    clock.sleep(25 * 3600)
    assert clients.named(certificate) is None
    assert anomalies.kinds == ["revocations_over"]
