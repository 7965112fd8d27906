"""A store behind one or more gRPC servers, the client of ``unified_cache.service``: ``grpc://HOST:PORT``."""

from importlib import import_module

from unified_cache.core.extras import needs_extra

with needs_extra("remote", "grpc:"):
    import_module("grpc")

__all__ = ()
