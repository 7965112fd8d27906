"""A store behind one or more gRPC servers, the client of ``unified_cache.service``: ``grpc://HOST:PORT``.

A page passes these files in this order:

    store       ``RemoteStorage``: the protocol's methods, each page at its server, failing over between them
    batches     which pages go in one call, and how long all calls of a request may take
    server      one server: connections, Hello, breaker
    scatter     a stream of pages into the buffers that they were asked for with
    url         servers, credentials and timeouts of a URL
"""

from importlib import import_module

from unified_cache.core.extras import needs_extra

with needs_extra("remote", "grpc:"):
    import_module("grpc")

__all__ = ()
