"""Questions of people to a service: whether it answers, what it holds for a tenant, how much of a prompt it restores.

Engines use ``RemoteStorage``; here each server is asked by itself.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from unified_cache.errors import ConfigError
from unified_cache.page import PageKey
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.remote.server import Server
from unified_cache.storage_backends.remote.url import parse_rest
from unified_cache.wire.calls import Call

__all__ = ["Inquiry", "Pong", "PromptCoverage", "open_inquiry"]

SCHEMES = {"grpc": False, "grpcs": True}
"""And whether each is over TLS."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer of a server to a ping: its description, and the time that it took."""

    server: str
    tenant: str
    store: str
    durable: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptCoverage:
    """Pages of one prompt that can be restored."""

    end: int
    pages_count: int
    bound_by: str
    """Pool that kept it from being more; empty if it is all."""


class Inquiry:
    """Servers to be asked; the first one where any can answer."""

    def __init__(self, servers: Sequence[Server], clock: Callable[[], float] = time.perf_counter) -> None:
        self._servers = servers
        self._clock = clock

    def ping(self) -> list[Pong]:
        """Say Hello to every server.

        Raises:
            StorageError: one does not answer, or refuses.
        """
        pongs: list[Pong] = []
        for server in self._servers:
            started_s = self._clock()
            reply = server.answer(Call.HELLO, pb.HelloRequest(tenant=server.tenant), pb.HelloReply)
            pongs.append(Pong(server.name, reply.tenant, reply.store, reply.durable, self._clock() - started_s))
        return pongs

    def stats(self) -> dict[str, pb.StatsReply]:
        """Ask every server what it holds for the caller; by server.

        Raises:
            StorageError: one does not answer, or refuses.
        """
        request = pb.StatsRequest(tenant=self._servers[0].tenant)
        return {server.name: server.answer(Call.STATS, request, pb.StatsReply) for server in self._servers}

    def lookup(self, manifest: Manifest, prompts: Sequence[Sequence[PageKey]]) -> Iterator[PromptCoverage]:
        """Ask the first server, prompt by prompt, how much of each, given by its keys, can be restored.

        Raises:
            StorageError: it does not answer, or refuses.
        """
        server = self._servers[0]
        for keys in prompts:
            request = pb.LookupRequest(tenant=server.tenant, identity=manifest.identity, keys=pb.Keys(keys=keys))
            reply = server.answer(Call.LOOKUP, request, pb.LookupReply, {manifest.identity: manifest})
            yield PromptCoverage(reply.end_max, reply.pages_count, reply.bound_by)

    def clear(self, manifest: Manifest | None) -> dict[str, int]:
        """Clear one identity at every server, None for all that it knows of the caller; return counts by server.

        Raises:
            StorageError: a server does not answer, or refuses; those before it are cleared.
        """
        removed_counts: dict[str, int] = {}
        for server in self._servers:
            request = pb.ClearRequest(tenant=server.tenant)
            manifests = None if manifest is None else {manifest.identity: manifest}
            if manifest is not None:
                request.identity = manifest.identity
            removed_counts[server.name] = server.answer(Call.CLEAR, request, pb.ClearReply, manifests).removed_count
        return removed_counts

    def drain(self) -> list[str]:
        """Let every server finish the calls in flight and end; return their names.

        Raises:
            StorageError: a server does not answer, or refuses; those before it are ending.
        """
        for server in self._servers:
            server.answer(Call.DRAIN, pb.DrainRequest(tenant=server.tenant), pb.DrainReply)
        return [server.name for server in self._servers]


@contextmanager
def open_inquiry(url: str) -> Iterator[Inquiry]:
    """Open connections to the servers that a ``grpc:`` or ``grpcs:`` URL names.

    Raises:
        ConfigError: it names none.
    """
    scheme, _, rest = url.partition(":")
    if scheme not in SCHEMES:
        raise ConfigError(f"a service is named as grpc://HOST:PORT or grpcs://HOST:PORT, found {url!r}")
    options = parse_rest(rest, secure=SCHEMES[scheme])
    servers = [Server.connect(name, options) for name in options.servers]
    try:
        yield Inquiry(servers)
    finally:
        for server in servers:
            server.close()
