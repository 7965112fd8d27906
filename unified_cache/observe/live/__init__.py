"""Live page: what a cache or a service holds and does now, in a browser and as JSON.

Its server runs on a thread of its own, and reads figures that were published for any thread; it never calls a cache.
Needs the extra ``live``. From the figures to the browser:

    figures        values of one moment; torch is not needed
    authenticator  authentication of readers
    updates        their JSON, and totals of the last minutes
    readers        open pages that listen, of whom a slow one keeps nobody waiting
    server         the HTTP server: page, JSON, and server-sent events
    cache_figures  figures of a cache that an engine embeds
    page           ``LivePage``: such a cache on a page of its own
    live.html, live.css, live.js, live.svg   the page; nothing else is fetched
"""

__all__ = ()
