"""A whole server: listeners, access, store, health, metrics, opened together and drained in order."""

import os
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

import grpc
from grpc_health.v1 import health  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry

from unified_cache.core.drain import Drain
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.addresses import ListenAddress
from unified_cache.core.settings.service import Role, ServiceSettings
from unified_cache.core.sizes import size_text
from unified_cache.observe.live.listener import MetricsListener
from unified_cache.proto.wire import SERVICE
from unified_cache.service.access.callers import NO_CREDENTIALS, Caller
from unified_cache.service.access.fairness import FairScheduler
from unified_cache.service.access.gate import CallTimeouts, ServiceGate
from unified_cache.service.access.reloaded import Reloaded
from unified_cache.service.access.tls import (
    Certificates,
    CertifiedClients,
    ClientTrust,
    certificate_changes,
    metrics_context,
    read_certificates,
    read_trust,
    server_credentials,
    trust_changes,
)
from unified_cache.service.access.tokens import Tokens, presented_token, read_tokens, token_changes
from unified_cache.service.access.usage import COUNTED_PAGES_MAX, TenantUsage
from unified_cache.service.limits import Limits
from unified_cache.service.operations.logs import Log, open_audit
from unified_cache.service.operations.metrics import BoundedLabels, ServiceMetrics, UsageCollector
from unified_cache.service.operations.process import room_for_connections
from unified_cache.service.operations.public_calls import HealthService, PublicCalls, reflection_methods
from unified_cache.service.operations.unix_socket import held_socket
from unified_cache.service.servicer import CacheService
from unified_cache.service.store.guarded import GuardedStore
from unified_cache.service.store.tenants import TenantStore

STOP_S = 1.0
"""Time that calls have to notice that the grace is over."""

REFUSING_THREADS = 16
"""Threads beyond those of admitted calls, for calls that are refused at once."""

REFUSALS_MAX = 256
"""Calls that wait for such a thread; beyond, gRPC refuses them itself, whosever they are."""

TENANTS_MAX = 200
POOLS_MAX = 64
"""Tenants, and pools, with series of their own in the metrics; all others are ``other``."""

SOCKET_UMASK = 0o177
"""A Unix socket is for its owner alone."""


@dataclass(frozen=True, slots=True)
class Service:
    """A server that listens, and everything it owns. ``open`` makes one, ``drain`` or ``close`` ends it."""

    port: int
    """Port of the calls; 0 for a Unix socket."""
    metrics_port: int | None
    """None for no metrics."""
    _server: grpc.Server
    _gate: ServiceGate
    _healthy: HealthService
    _opened: ExitStack

    @classmethod
    def open(cls, settings: ServiceSettings, log: Log, drain: Drain, limits: Limits | None = None) -> "Service":
        """Open the store, make everything ready and begin to serve; an administrator's call asks ``drain`` for the end.

        ``limits`` are those of the settings unless given.

        Raises:
            ConfigError: the settings cannot be met: an address in use, bad files.
            StorageError: the store cannot be opened.
        """
        limits = limits or Limits.of(settings.limits)
        with ExitStack() as opened:
            metrics = _metrics(settings, log)
            access = _Access.read(settings, metrics)
            listener = _metrics_listener(settings, metrics, access)
            if listener is not None:
                opened.callback(listener.close)
            scheduler = FairScheduler(settings.quota, limits)
            timeouts = CallTimeouts(limits, time.monotonic)
            opened.callback(timeouts.close)
            gate = ServiceGate(access.caller, scheduler, timeouts, metrics)
            guarded = GuardedStore.open(settings, metrics.registry)
            capability, disk_bytes = guarded.guard.capability(), guarded.disk_bytes
            bytes_max = capability.bytes_max
            if bytes_max is not None and disk_bytes is not None and bytes_max > disk_bytes:
                text = f"storage_bytes is {size_text(bytes_max)}, the disk of the store has {size_text(disk_bytes)}"
                metrics.anomaly("cap_above_disk", f"{text}: the store is full when the disk is")
            usage = TenantUsage(settings.quota, COUNTED_PAGES_MAX, bytes_max, capability.taken_bytes)
            store = TenantStore(guarded.guard, usage, metrics, guarded.own)
            cache = CacheService(store, gate, limits, drain.ask)
            opened.callback(cache.close)
            stop = Event()
            counting = Thread(target=store.count_stored, args=(stop,), name="tenant-count", daemon=True)
            opened.callback(counting.join, STOP_S)
            opened.callback(stop.set)
            counting.start()
            metrics.registry.register(UsageCollector(scheduler, store, metrics.tenants))
            healthy = HealthService([SERVICE], limits.public_calls_max, timeouts)
            if settings.address.socket is not None:
                opened.enter_context(held_socket(settings.address.socket))
            server = _new_server(settings, limits, cache, healthy, timeouts)
            port = _listen(server, settings.address, access.credentials())
            if access.clients is None and not settings.address.is_local:
                metrics.anomaly(
                    "insecure",
                    f"other machines may call {settings.address.text} without a certificate, and read what it serves",
                )
            server.start()
            if listener is not None:
                listener.start()
            metrics_port = None if listener is None else listener.port
            return cls(port, metrics_port, server, gate, healthy, opened.pop_all())

    def drain(self, grace_s: float) -> bool:
        """Refuse new calls, let those in flight end within ``grace_s``, then close; return whether all of them did."""
        self._healthy.stop_serving()
        self._gate.close()
        finished = self._gate.wait_idle(grace_s)
        self._server.stop(STOP_S).wait()
        self.close()
        return finished

    def close(self) -> None:
        """Stop at once and let everything go; what the store has acknowledged stays."""
        self._server.stop(None).wait()
        self._opened.close()


@dataclass(frozen=True, slots=True)
class _Access:
    """Files that say who may call: read at the start, and again when they change."""

    tokens: Tokens | None
    certificates: Reloaded[Certificates] | None
    """None for plain text."""
    trust: Reloaded[ClientTrust] | None
    """None where no client certificates are asked for."""
    clients: CertifiedClients | None
    local: Caller
    """Every caller of a server that has neither tokens nor client certificates."""

    @classmethod
    def read(cls, settings: ServiceSettings, metrics: ServiceMetrics) -> "_Access":
        access, tls = settings.access, settings.tls
        tokens = certificates = trust = clients = None
        if access.tokens is not None:
            read = partial(read_tokens, access.tokens)
            entries = Reloaded([access.tokens], read, access, time.monotonic, metrics, token_changes)
            metrics.stale.labels("tokens").set_function(entries.stale_s)
            tokens = Tokens(entries, time.time)
        if tls is not None:
            own = partial(read_certificates, tls)
            files = [tls.certificate, tls.key]
            shown = certificates = Reloaded(files, own, access, time.monotonic, metrics, certificate_changes)
            metrics.stale.labels("certificates").set_function(certificates.stale_s)
            metrics.expiry.labels("certificate").set_function(lambda: shown.latest().expires_s)
        if tls is not None and tls.client_ca is not None:
            files = [path for path in (tls.client_ca, tls.client_crl) if path is not None]
            read_clients = partial(read_trust, tls, time.time)
            trusted = trust = Reloaded(files, read_clients, access, time.monotonic, metrics, trust_changes)
            metrics.stale.labels("client_ca").set_function(trust.stale_s)
            metrics.expiry.labels("client_crl").set_function(lambda: trusted.latest().expires_s)
            clients = CertifiedClients(trust, tls.trust_domain, access.certificate_role, time.time, metrics)
        local = Caller(access.local_tenant, access.local_role, NO_CREDENTIALS)
        return cls(tokens, certificates, trust, clients, local)

    def caller(self, context: grpc.ServicerContext) -> Caller | None:
        """Return whom a call's token speaks for, or without one the certificate of its connection; None for nobody.

        A call with a wrong token is refused, whatever its certificate, and one over a revoked certificate, whatever its
        token.
        """
        token = presented_token(context)
        if token is not None:
            trusted = self.clients is None or self.clients.trusts(context)
            return self.tokens.caller(token) if trusted and self.tokens is not None else None
        if self.clients is not None:
            return self.clients.caller(context)
        return self.local if self.tokens is None else None

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials to listen with, None for plain text."""
        return None if self.certificates is None else server_credentials(self.certificates, self.trust)


def _metrics(settings: ServiceSettings, log: Log) -> ServiceMetrics:
    audit = open_audit(settings.audit.file, log)
    return ServiceMetrics(CollectorRegistry(), BoundedLabels(TENANTS_MAX), BoundedLabels(POOLS_MAX), log, audit)


def _metrics_listener(settings: ServiceSettings, metrics: ServiceMetrics, access: _Access) -> MetricsListener | None:
    """Open the listener for metrics and the live page, None for none.

    An authority of their own vouches for all it certifies; of those that the service's authority certifies, and of
    those that show a token, an admin alone may read. Where neither certificates nor, from elsewhere, tokens are asked
    for, all may who reach the address.
    """
    address, tls = settings.metrics_address, settings.tls
    if address is None:
        return None
    context = None
    own_ca = settings.metrics.client_ca
    if tls is not None:
        client_ca = own_ca or tls.client_ca
        files = [path for path in (tls.certificate, tls.key, client_ca) if path is not None]
        made = partial(metrics_context, tls, client_ca, may_show_token=access.tokens is not None)
        changed = [("metrics_tls_changed", "certificate or authorities of the metrics")]
        reloaded = Reloaded(files, made, settings.access, time.monotonic, metrics, lambda _before, _after: changed)
        context = reloaded.latest
    is_open = access.clients is None and own_ca is None and (address.is_local or access.tokens is None)
    readers = None if is_open else partial(_status_of_reader, access, own_ca is not None)
    return MetricsListener(address, metrics.registry, readers, context)


def _status_of_reader(access: _Access, is_certified_enough: bool, connection: socket.socket, token: str | None) -> int:
    """Return 200 for a reader of the metrics, which name every tenant; else the status that refuses it."""
    certificate = connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
    caller = None
    if certificate is not None:
        if is_certified_enough:
            return 200
        if access.clients is not None:
            caller = access.clients.named(ssl.DER_cert_to_PEM_cert(certificate).encode())
    if token is not None and access.tokens is not None:
        caller = access.tokens.caller(token)
    if caller is not None and caller.role is Role.ADMIN:
        return 200
    return 403 if caller is not None or access.tokens is None else 401


def _new_server(
    settings: ServiceSettings, bounds: Limits, cache: CacheService, healthy: HealthService, timeouts: CallTimeouts
) -> grpc.Server:
    public_max = 2 * bounds.public_calls_max  # checks, reflection
    threads_max = bounds.calls_max + public_max + REFUSING_THREADS
    options = [
        ("grpc.so_reuseport", 0),  # two servers at one address would share its calls, unnoticed
        ("grpc.max_allowed_incoming_connections", room_for_connections(bounds.connections_max)),
        *bounds.channel_options(),
    ]
    server = grpc.server(
        ThreadPoolExecutor(threads_max, thread_name_prefix="unified-cache-call"),
        options=options,
        maximum_concurrent_rpcs=threads_max + REFUSALS_MAX,
    )
    server.add_generic_rpc_handlers((cache.rpc_methods(), healthy.rpc_methods()))
    if settings.reflection:
        places = PublicCalls(bounds.public_calls_max, timeouts)
        server.add_generic_rpc_handlers((reflection_methods(places, SERVICE, health.SERVICE_NAME),))
    return server


def _listen(server: grpc.Server, address: ListenAddress, credentials: grpc.ServerCredentials | None) -> int:
    umask = os.umask(SOCKET_UMASK)
    try:
        if credentials is None:
            return server.add_insecure_port(address.text)
        return server.add_secure_port(address.text, credentials)
    except RuntimeError as error:
        raise ConfigError(f"{address.text} cannot be listened at; is it in use?") from error
    finally:
        os.umask(umask)
