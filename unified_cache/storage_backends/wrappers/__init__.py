"""Wrappers over any store: each is a ``Store`` around another, adds one thing, and composes with the rest.

Innermost first, as a cache stacks them; an engine's store and a service verify within the guard::

    CodedStorage      pages are compressed, encrypted or both, where the URL or who wrote them says so
    MeteredStorage    what the store itself does, call by call, is counted
    StorageGuard      a call that hangs becomes an error, faults that pass are not seen, a failing store is paused
    VerifiedStorage   no wrong byte comes through, whatever happens below

Every wrapper owns what it wraps: closing it closes that. ``MeteredStorage`` needs the ``metrics`` extra and is
imported from its own module, ``unified_cache.storage_backends.wrappers.metered``.
"""

from unified_cache.storage_backends.wrappers.guard import StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.layer import Method

__all__ = ["Method", "StorageGuard", "declared_capability"]
