"""Keys that pages are encrypted with: where they come from, which one is whose, and how they change.

The text that a file, a variable or a command gives has a line for each key: whose pages it is for, and 64 hex digits,
as ``openssl rand -hex 32`` prints them::

    *          3b1f...    pages of everybody who has no key of their own
    @acme      90ce...    pages of a tenant of the service
    3f2a9b...  77d0...    pages of one identity, by its digest

Of several keys of one owner the last one writes, and all of them read: to change a key, add a line at the end, and drop
the old one when its pages may go. The text is read again every ``RELOADED_S``, and at once for a key that is not known.
"""

import hmac
import logging
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock

from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import needs_extra

with needs_extra("encrypt", "keys="):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["PageCipher", "PageKeys", "key_text_of"]

logger = logging.getLogger(__name__)

KEY_ID_BYTES = 8
RELOADED_S = 10.0
"""A writer uses a new key so long after it was added, at most."""
UNKNOWN_RELOADED_S = 1.0
"""Least time between two readings of the text for keys that are not known."""
COMMAND_S_MAX = 10.0
CIPHERS_MAX = 4096

EVERYBODY = "*"
_LINE = re.compile(r"(\*|@[a-z0-9][a-z0-9._-]{0,63}|[0-9a-f]{64})\s+([0-9a-fA-F]{64})")


def key_text_of(source: str) -> Callable[[], str]:
    """Return what reads the text that ``file:PATH``, ``env:NAME`` or ``command:ARGS`` names; raise ConfigError."""
    scheme, _, rest = source.partition(":")
    readers: Mapping[str, Callable[[], str]] = {
        "file": lambda: Path(rest).read_text(encoding="ascii"),
        "env": lambda: os.environ[rest],
        "command": lambda: (
            subprocess.run(  # noqa: S603 -- who names a store names code to run
                shlex.split(rest), check=True, capture_output=True, timeout=COMMAND_S_MAX, encoding="ascii"
            ).stdout
        ),
    }
    if scheme not in readers or not rest:
        raise ConfigError(f"keys come from file:PATH, env:NAME or command:ARGS, found the scheme {scheme!r}")
    return readers[scheme]


class PageCipher:
    """The key of one owner for the pages of one identity: each has a key of its own, made from its owner's."""

    __slots__ = ("_cipher", "id")

    def __init__(self, key_id: bytes, owners_key: bytes, identity: bytes) -> None:
        self.id = key_id
        self._cipher = AESGCM(hmac.digest(owners_key, b"unified-cache-page-key-v1" + identity, "sha256"))

    def encrypt(self, nonce: bytes, content: bytes, bound: bytes) -> bytes:
        """Return the content encrypted, and the tag behind it, to which ``bound`` is bound."""
        return self._cipher.encrypt(nonce, content, bound)

    def decrypt(self, nonce: bytes, content: memoryview, bound: bytes) -> bytes | None:
        """Return what was encrypted; None where the tag is not that of this content, nonce and ``bound``."""
        try:
            return self._cipher.decrypt(nonce, content, bound)
        except InvalidTag:
            return None


class PageKeys:
    """The keys of one store. Thread-safe. No key is in a message, a log or a ``repr``. ``clock`` gives seconds."""

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the text that ``source`` names.

        Raises:
            ConfigError: there is none, or it holds something else than keys.
        """
        self._source = source
        self._read = key_text_of(source)
        self._clock = clock
        self._keys = self._parsed()
        self._read_s = clock()
        self._unknown_s = self._read_s - UNKNOWN_RELOADED_S
        self._ciphers: dict[tuple[bytes, bytes], PageCipher] = {}
        self._reading = Lock()

    def writing(self, identity: bytes, model: str) -> PageCipher | None:
        """Return the newest key for pages of an identity; None where its owner has none."""
        if self._clock() - self._read_s >= RELOADED_S and self._reading.acquire(blocking=False):
            try:
                self._reload()
            finally:
                self._reading.release()
        keys = self._of(identity, model)
        return self._cipher_of(next(reversed(keys)), keys, identity) if keys else None

    def reading(self, identity: bytes, model: str, key_id: bytes) -> PageCipher | None:
        """Return the key of that ID for pages of an identity; None where its owner has no such key."""
        if key_id not in self._of(identity, model):
            with self._reading:
                if self._clock() - self._unknown_s >= UNKNOWN_RELOADED_S:
                    self._reload()
                    self._unknown_s = self._clock()  # who waited for a slow command does not run it again
        keys = self._of(identity, model)
        return self._cipher_of(key_id, keys, identity) if key_id in keys else None

    def _of(self, identity: bytes, model: str) -> dict[bytes, bytes]:
        """Return the keys of the nearest owner that has any, by ID, the newest last."""
        tenant = model.partition("/")[0]
        owners = (identity.hex(), tenant, EVERYBODY)
        return next((keys for owner in owners if (keys := self._keys.get(owner))), {})

    def _cipher_of(self, key_id: bytes, keys: Mapping[bytes, bytes], identity: bytes) -> PageCipher:
        found = self._ciphers.get((key_id, identity))
        if found is None:
            found = PageCipher(key_id, keys[key_id], identity)
            if len(self._ciphers) >= CIPHERS_MAX:
                self._ciphers.clear()
            self._ciphers[key_id, identity] = found
        return found

    def _reload(self) -> None:
        """Read the text again, one thread at a time; where that fails, what was read before counts."""
        self._read_s = self._clock()
        try:
            self._keys = self._parsed()
        except ConfigError as error:
            logger.warning("keys are as they were: %s", error)

    def _parsed(self) -> dict[str, dict[bytes, bytes]]:
        try:
            text = self._read()
        except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            # Its text may quote what a command printed.
            raise ConfigError(f"cannot read keys from {self._source}: {type(error).__name__}") from None
        keys: dict[str, dict[bytes, bytes]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            found = _LINE.fullmatch(stripped)
            if found is None:
                raise ConfigError(f"line {number} of {self._source} must be an owner and 64 hex digits")
            key = bytes.fromhex(found[2])
            key_id = hmac.digest(key, b"unified-cache-key-id-v1", "sha256")[:KEY_ID_BYTES]
            owned = keys.setdefault(found[1], {})
            owned.pop(key_id, None)
            owned[key_id] = key
        if not keys:
            raise ConfigError(f"{self._source} must hold a line with an owner and a key, found none")
        return keys
