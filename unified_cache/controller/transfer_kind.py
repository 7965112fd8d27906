"""Ways between tiers."""

from enum import Enum

__all__ = ["TransferKind"]


class TransferKind(Enum):
    """The four ways between tiers, and the one out."""

    BACKUP = "backup"
    """Device to host; and on to storage where there is one."""
    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Host to storage."""
    PREFETCH = "prefetch"
    """Storage to host."""
    CLEAR = "clear"
    """Out of storage."""

    __hash__ = object.__hash__  # see Answer
