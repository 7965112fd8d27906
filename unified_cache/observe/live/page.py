"""A cache that an engine embeds, on a page of its own.

with LivePage.start(cache, port=8765) as page:
    print(page.url)
    ...
"""

from unified_cache.cache.stats import StatsSource
from unified_cache.observe.live.authenticator import OpenAuthenticator, TokenAuthenticator
from unified_cache.observe.live.cache_figures import CacheFigures
from unified_cache.observe.live.server import LiveAddress, LiveServer

__all__ = ["LivePage"]


class LivePage(LiveServer):
    """A page that shows what a cache holds and does, for as long as it is open. For any thread.

    Its thread reads what the cache's owner publishes in ``poll``, ``wait_all`` and ``close``; it never waits for the
    owner.
    """

    @classmethod
    def start(
        cls,
        cache: StatsSource,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        name: str = "cache",
        every_s: float = 1.0,
    ) -> "LivePage":
        """Serve the figures of ``cache`` at ``port`` of this machine, 0 for any; ``name`` is its title.

        An open page is brought up to date once in ``every_s``. Elsewhere than on a loopback address it needs a token,
        which goes over the network as plain text: put it behind a proxy with TLS, or a tunnel.

        Raises:
            ConfigError: the address cannot be listened at, the token is too short, or there is none and other machines
                could reach the page.
            MissingExtraError: the extra ``live`` is not installed.
        """
        authenticator = OpenAuthenticator() if token is None else TokenAuthenticator(token)
        return cls.open(CacheFigures(name, cache), LiveAddress(host, port, every_s), authenticator)
