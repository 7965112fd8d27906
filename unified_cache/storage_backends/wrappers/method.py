"""The methods of a store, by name."""

from enum import Enum

__all__ = ["Method"]


class Method(Enum):
    """A method of ``StorageBackend`` or of ``Catalog``: what a wrapper counts, times, delays or names in a message."""

    CAPABILITY = "capability"
    REGISTER = "register"
    EXISTS = "exists"
    GET = "get"
    PUT = "put"
    TOUCH = "touch"
    REMOVE = "remove"
    CLEAR = "clear"
    SCAN = "scan"
    MANIFESTS = "manifests"
    USED_BETWEEN = "used_between"
    CLOSE = "close"

    __hash__ = object.__hash__  # see Answer
