"""Names of one recording: the same page has the same name in it, and nobody can tell which page that is.

A name is a digest of the page's key under a secret salt. Keys alone would not do: whoever guesses a prompt can compute
its keys. The salt is made at random and never written, so that two recordings cannot be held against each other
either, unless they are given the same one.
"""

from collections.abc import Sequence
from hashlib import blake2b

from unified_cache.errors import ConfigError
from unified_cache.page import PageKey

__all__ = ["SALT_BYTES", "TraceNames"]

SALT_BYTES = 32
"""Length of a salt; as many as a key has."""

_NAME_BYTES = 8
_SHIFT = 1
"""Names are 63 bits, non-negative in an int64: among ten million pages two share one with a probability of 5e-6."""


class TraceNames:
    """Names under one salt. For any thread."""

    __slots__ = ("_salt",)

    def __init__(self, salt: bytes) -> None:
        """Take a secret salt.

        Raises:
            ConfigError: it is not of its length.
        """
        if len(salt) != SALT_BYTES:
            raise ConfigError(f"the salt of a recording has {SALT_BYTES} bytes, found {len(salt)}")
        self._salt = salt

    def pages(self, keys: Sequence[PageKey]) -> list[int]:
        """Return the name of each page."""
        salt = self._salt
        return [
            int.from_bytes(blake2b(key, digest_size=_NAME_BYTES, key=salt).digest(), "little") >> _SHIFT for key in keys
        ]

    def namespace(self, seed: bytes) -> str:
        """Return the name of a namespace, in hex digits; empty for the default one."""
        return blake2b(seed, digest_size=_NAME_BYTES, key=self._salt, person=b"namespace").hexdigest() if seed else ""
