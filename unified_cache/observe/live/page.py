"""A cache that an engine embeds, on a page of its own.

with LivePage.start(cache, port=8765) as page:
    print(page.url)
    ...
"""

import hmac
import socket
from hashlib import sha256
from typing import Self

from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import needs_extra
from unified_cache.core.settings.addresses import ListenAddress
from unified_cache.observe.live.listener import MetricsListener, Readers
from unified_cache.observe.metrics import CacheCollector, StatsSource

with needs_extra("metrics", "the live page"):
    from prometheus_client import CollectorRegistry

__all__ = ["LivePage"]

TOKEN_CHARACTERS_MIN = 16
"""Shorter ones could be guessed."""


class LivePage:
    """A page that shows what a cache holds and does, and its ``/metrics``, for as long as it is open. For any thread.

    It reads what the cache's owner publishes in ``poll``, ``wait_all`` and ``close``, and never waits for the owner.
    """

    def __init__(self, listener: MetricsListener, host: str) -> None:
        self._listener = listener
        self.port = listener.port
        """Port that it listens at."""
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{listener.port}/"
        """Address of the page, for a browser on this machine."""

    @classmethod
    def start(
        cls,
        cache: StatsSource,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        name: str = "cache",
    ) -> Self:
        """Serve the figures of ``cache`` at ``port`` of this machine, 0 for any; ``name`` labels them.

        Elsewhere than on a loopback address it needs a token, which goes over the network as plain text: put it behind
        a proxy with TLS, or a tunnel.

        Raises:
            ConfigError: the address cannot be listened at, the token is too short, or there is none and other machines
                could reach the page.
            MissingExtraError: the extra ``metrics`` is not installed.
        """
        shown = f"[{host}]" if ":" in host else host
        address = ListenAddress.of(f"{shown}:{port}")
        if token is None and not address.is_local:
            raise ConfigError(
                f"a live page that other machines can reach needs a token, found {host} and none; give it one, or "
                f"listen at 127.0.0.1"
            )
        registry = CollectorRegistry()
        registry.register(CacheCollector(cache, name))
        listener = MetricsListener(address, registry, None if token is None else _holder_of(token))
        listener.start()
        return cls(listener, host)

    def close(self) -> None:
        """Stop serving and cut off its readers. Once more does nothing."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder_of(token: str) -> Readers:
    """Admit readers who show the token, compared in the same time for every text."""
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"the token of a live page must have at least {TOKEN_CHARACTERS_MIN} characters, found {len(token)}; "
            f"secrets.token_urlsafe() makes one"
        )
    expected = sha256(token.encode("utf-8", "surrogatepass")).digest()

    def readers(_connection: socket.socket, shown: str | None) -> int:
        found = sha256((shown or "").encode("utf-8", "surrogatepass")).digest()
        return 200 if hmac.compare_digest(found, expected) else 401

    return readers
