"""Wrappers over any store: each is a ``StorageBackend`` around another, adds one thing, and composes with the rest.

Innermost first, as an engine stacks them::

    CheckedStorage    what the store answers is what its methods may answer
    MeteredStorage    what the store itself does, call by call
    DeadlineStorage   a call that hangs becomes an error, and says when it has let go of its buffers
    RetryStorage      faults that pass are not seen above
    BreakerStorage    a store that keeps failing is absent for a while
    VerifiedStorage   no wrong byte comes through, whatever happens below

``StorageGuard`` is the third to the fifth of them in this order, and says why it is this one.

Every wrapper owns what it wraps: closing it closes that. ``MeteredStorage`` needs the ``metrics`` extra and is
imported from its own module, ``unified_cache.storage_backends.wrappers.metered``.
"""

from unified_cache.storage_backends.wrappers.breaker import BreakerStorage
from unified_cache.storage_backends.wrappers.checked import CheckedStorage
from unified_cache.storage_backends.wrappers.deadline import DeadlineStorage, StuckCall
from unified_cache.storage_backends.wrappers.guard import StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.layer import Method
from unified_cache.storage_backends.wrappers.retry import RetryStorage

__all__ = [
    "BreakerStorage",
    "CheckedStorage",
    "DeadlineStorage",
    "Method",
    "RetryStorage",
    "StorageGuard",
    "StuckCall",
    "declared_capability",
]
