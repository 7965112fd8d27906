"""The methods of a store, by name."""

from enum import Enum

__all__ = ["Method"]


class Method(Enum):
    """A method of ``StorageBackend``: what a wrapper counts, times, delays or names in a message."""

    CAPABILITY = "capability"
    REGISTER = "register"
    EXISTS = "exists"
    GET = "get"
    PUT = "put"
    TOUCH = "touch"
    REMOVE = "remove"
    CLEAR = "clear"
    SCAN = "scan"
    CLOSE = "close"
