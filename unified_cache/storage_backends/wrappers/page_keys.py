"""Keys that pages are encrypted with: where they come from, which one is whose, and how they change.

The text that a file or a variable gives has a line for each key: whose pages it is for, and 64 hex digits,
as ``openssl rand -hex 32`` prints them::

    *          3b1f...    pages of everybody who has no key of their own
    @acme      90ce...    pages of a tenant of the service
    3f2a9b...  77d0...    pages of one identity, by its digest

Of several keys of one owner the last one writes, and all of them read: to change a key, add a line at the end, and drop
the old one when its pages may go. The text is read again every ``RELOADED_S``, and at once for a key that is not known.
A file is kept as a private key is.
"""

import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from threading import Lock

from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import needs_extra
from unified_cache.core.files import expanded, read_kept
from unified_cache.storage_backends.manifest import EVERYBODY

with needs_extra("encrypt", "keys="):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

KEY_ID_BYTES = 8
RELOADED_S = 10.0
"""A key that was added or removed holds everywhere so long after, at most, and as long as the text takes to read."""
UNKNOWN_RELOADED_S = 1.0
"""Least time between two readings of the text for keys that are not known."""
STALE_S_MAX = 60.0
"""Keys hold no more once their text could not be read for so long, as tokens: one may have been removed from it."""
CIPHERS_MAX = 4096

_LINE = re.compile(r"(\*|@[a-z0-9][a-z0-9._-]{0,63}|[0-9a-f]{64})\s+([0-9a-fA-F]{64})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY_DIGITS = re.compile(r"[0-9A-Fa-f]{32,}")
_Keys = dict[str, dict[bytes, bytes]]


def _key_text_of(source: str) -> Callable[[], str]:
    """Return what reads the text that ``file:PATH`` or ``env:NAME`` names; raise ConfigError."""
    scheme, _, rest = source.partition(":")
    if scheme == "file" and rest:
        forbidden = stat.S_IWGRP | stat.S_IRWXO
        return lambda: read_kept(expanded(rest), forbidden).decode("ascii")
    if scheme == "env" and _VARIABLE.fullmatch(rest):
        return lambda: os.environ[rest]
    # What stands there may be a key.
    raise ConfigError("keys come from file:PATH or env:NAME, found something else")


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
        self._read = _key_text_of(source)
        self._shown = _KEY_DIGITS.sub("...", source)
        self._clock = clock
        self._keys = self._parsed()
        if not self._keys:
            raise ConfigError(f"keys: {self._shown} must hold a line with an owner and a key, found none")
        self._read_s = clock()
        self._asked_s = self._read_s - UNKNOWN_RELOADED_S
        self._failing_s: float | None = None
        self._ciphers: dict[tuple[bytes, bytes], PageCipher] = {}
        self._reading = Lock()

    def _refresh(self) -> None:
        """Read the text again if that is due."""
        if self._is_old():
            self._reload(self._is_old)

    def writing(self, identity: bytes, owner: str | None) -> PageCipher | None:
        """Return the newest key for pages of an identity; None where its owner has none, or nobody knows the owner."""
        self._refresh()
        keys = self._of(identity, owner)
        return self._cipher_of(next(reversed(keys)), keys, identity) if keys else None

    def reading(self, identity: bytes, owner: str | None, key_id: bytes) -> PageCipher | None:
        """Return the key of that ID for pages of an identity; None where its owner has no such key."""
        self._refresh()
        keys = self._of(identity, owner)
        if key_id not in keys:
            self._reload(self._may_ask)
            keys = self._of(identity, owner)
        return self._cipher_of(key_id, keys, identity) if key_id in keys else None

    def _of(self, identity: bytes, owner: str | None) -> dict[bytes, bytes]:
        """Return the keys of the nearest owner that has any, by ID, the newest last; none without an owner."""
        owners = (identity.hex(),) if owner is None else (identity.hex(), owner, EVERYBODY)
        return next((keys for each in owners if (keys := self._keys.get(each))), {})

    def _cipher_of(self, key_id: bytes, keys: Mapping[bytes, bytes], identity: bytes) -> PageCipher:
        found = self._ciphers.get((key_id, identity))
        if found is None:
            found = PageCipher(key_id, keys[key_id], identity)
            if len(self._ciphers) >= CIPHERS_MAX:
                self._ciphers.clear()
            self._ciphers[key_id, identity] = found
        return found

    def _is_old(self) -> bool:
        return self._clock() - self._read_s >= RELOADED_S

    def _may_ask(self) -> bool:
        """Return whether the text may be read for a key that is not known, and count that as done."""
        may = self._clock() - self._asked_s >= UNKNOWN_RELOADED_S
        self._asked_s = self._clock() if may else self._asked_s
        return may

    def _reload(self, is_due: Callable[[], bool]) -> None:
        """Read the text again unless another thread has meanwhile."""
        with self._reading:
            if is_due():
                self._read_again()

    def _read_again(self) -> None:
        """Read the text; where that fails, what was read before counts for ``STALE_S_MAX``. Under the lock."""
        self._read_s = began_s = self._clock()
        try:
            self._keys = self._parsed()
            self._failing_s = None
            self._ciphers = {}
        except ConfigError as error:
            if self._failing_s is None:
                self._failing_s = began_s
                logger.warning("%s; those that were read before hold for another %.0f s", error, STALE_S_MAX)
            elif began_s - self._failing_s > STALE_S_MAX and self._keys:
                self._keys, self._ciphers = {}, {}
                logger.warning("%s; none holds any more", error)

    def _parsed(self) -> _Keys:
        try:
            text = self._read()
        except ConfigError as error:
            raise ConfigError(f"cannot read keys: {_KEY_DIGITS.sub('...', str(error))}") from None
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"cannot read keys from {self._shown}: {type(error).__name__}") from None
        keys: _Keys = {}
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            found = _LINE.fullmatch(stripped)
            if found is None:
                raise ConfigError(f"line {number} of {self._shown} must be an owner and 64 hex digits")
            key = bytes.fromhex(found[2])
            key_id = hmac.digest(key, b"unified-cache-key-id-v1", "sha256")[:KEY_ID_BYTES]
            owned = keys.setdefault(found[1], {})
            owned.pop(key_id, None)
            owned[key_id] = key
        return keys
