"""Certificates: who is let in, whom they name, and that they change without a restart."""

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from tests.support.certificates import Authority, Issued
from tests.support.running_service import CALL_S, RunningService, called, credentials, refusal, running
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.access import TlsSettings
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import Call
from unified_cache.service.access.tls import read_certificates, read_trust

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


def test_the_tenant_is_the_common_name_of_the_certificate(authority: Authority, server: RunningService) -> None:
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"
    with grpc.secure_channel(server.address, credentials(authority, authority.issue("acme/admin"))) as channel:
        assert refusal(channel, Call.CLEAR) is None
    with grpc.secure_channel(server.address, credentials(authority, authority.issue("acme"))) as channel:
        assert refusal(channel, Call.REMOVE) == (grpc.StatusCode.PERMISSION_DENIED, "Remove needs the role writer")


@pytest.mark.parametrize("name", ["", "Acme", "../x", "acme/king", "acme/admin/more", "/admin", ".acme", "a b"])
def test_a_name_that_is_no_tenant_is_nobody(authority: Authority, server: RunningService, name: str) -> None:
    issued = authority.issue(name or " ", uris=("spiffe://cluster.example/unified-cache/acme/admin",))
    with grpc.secure_channel(server.address, credentials(authority, issued)) as channel:
        refused = refusal(channel, Call.HELLO)
    assert refused is not None
    assert refused[0] is grpc.StatusCode.UNAUTHENTICATED


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
            with grpc.secure_channel(server.address, credentials(authority, issued)) as channel:
                refused = refusal(channel, Call.HELLO)
            assert refused is not None, uris
            # Of two SPIFFE IDs gRPC itself thinks as little.
            assert refused[0] in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE), uris


@pytest.mark.threat("a stranger calls")
def test_nobody_without_a_certificate_of_the_authority_gets_through_the_handshake(
    authority: Authority, server: RunningService
) -> None:
    foreign = Authority("foreign")
    channels = [
        grpc.secure_channel(server.address, credentials(authority)),
        grpc.secure_channel(server.address, credentials(authority, foreign.issue("acme"))),
        grpc.secure_channel(server.address, credentials(authority, authority.issue("acme", days=-1))),
        grpc.insecure_channel(server.address),
    ]
    for channel in channels:
        with channel:
            refused = refusal(channel, Call.HELLO)
            assert refused is not None
            assert refused[0] is grpc.StatusCode.UNAVAILABLE
    assert server.kinds == []
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"


def test_health_needs_the_handshake_and_no_tenant(authority: Authority, server: RunningService) -> None:
    with grpc.secure_channel(server.address, credentials(authority, authority.issue("No Tenant"))) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_token_over_a_certificate_says_who_calls_and_a_wrong_one_is_not_made_up_for(
    authority: Authority, server: RunningService
) -> None:
    with grpc.secure_channel(server.address, credentials(authority, authority.issue("acme"))) as channel:
        refused = refusal(channel, Call.HELLO, token="uc1_wrong")
    assert refused is not None
    assert refused[0] is grpc.StatusCode.UNAUTHENTICATED


def test_a_new_certificate_and_a_new_authority_hold_without_a_restart(
    authority: Authority, server: RunningService, tls: dict[str, str], tmp_path: Path
) -> None:
    assert hello(server, credentials(authority, authority.issue("acme"))).tenant == "acme"
    later = Authority("later")
    later.issue("server").write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(later.pem)
    assert hello(server, credentials(later, later.issue("new"))).tenant == "new"
    with grpc.secure_channel(server.address, credentials(later, authority.issue("acme"))) as channel:
        assert refusal(channel, Call.HELLO) is not None


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


def scraped(server: RunningService, context: ssl.SSLContext) -> str:
    url = f"https://127.0.0.1:{server.service.metrics_port}/metrics"
    with urlopen(url, timeout=CALL_S, context=context) as answer:
        return str(answer.read().decode())


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
    (expiry,) = [line for line in lines if line.startswith("unified_cache_service_certificate_expiry")]
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
    with pytest.raises(HTTPError, match="403") as refused:
        scraped(server, trusting(authority, authority.issue(name), tmp_path))
    refused.value.close()


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
        with grpc.secure_channel(server.address, credentials(authority, readers.issue("acme"))) as channel:
            assert refusal(channel, Call.HELLO) is not None
