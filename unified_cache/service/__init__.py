"""The gRPC service: one store for many engines, safe by default.

A call passes these rooms in order; each imports only from those before it.

addresses   where a server listens
settings    every setting of a server, with its default
access      the caller: certificate or token, role, quota, turn
store       pages in memory, in front of any storage backend
requests    the messages of one call: checked, looked up, streamed
servicer    the calls of the contract, put together from these
operations  metrics, logs, traces, drain; over ``access`` and ``store``
server      all of it opened, listening, and closed in order
"""

from importlib import import_module

from unified_cache.core.extras import needs_extra

with needs_extra("service", "the service"):
    import_module("grpc")
    import_module("cryptography")

__all__ = ()
