"""The gRPC service: one store for many engines, safe by default.

A call passes these rooms in order; each imports only from those before it.

access      the caller: certificate or token, role, quota, turn
store       any store, guarded, and shared by tenants
servicer    the calls of the contract: checked, carried out, streamed
operations  metrics, logs, health; over ``access`` and ``store``
server      all of it opened, listening, and closed in order
"""

from importlib import import_module

from unified_cache.core.extras import needs_extra

with needs_extra("service", "the service"):
    import_module("grpc")
    import_module("cryptography")

__all__ = ()
