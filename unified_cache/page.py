"""Tokens, pages and page keys: the names of prefixes, in the tree and in every store.

Tokens are converted once, at the boundary, to ``bytes`` of little-endian int32. From there on a page is a
slice of ``page_size * TOKEN_BYTES`` bytes: hashing, comparing and splitting are memcmp and memcpy.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ConfigError, TokenError

__all__ = [
    "DEFAULT_NAMESPACE",
    "PAGE_KEY_BYTES",
    "TOKEN_BYTES",
    "Namespace",
    "PageKey",
    "Prompt",
    "TokensLike",
    "encode_tokens",
]

TOKEN_BYTES = 4
"""One token id, int32 little-endian."""

PAGE_KEY_BYTES = 32
"""SHA-256 digest of one page and everything before it; as SGLang 0.5.23 computes it."""

TOKEN_ID_MAX = 2**31 - 1

_ENCODED = np.dtype("<i4")

PageKey = bytes
"""Identity of a page and its whole prefix, in one namespace: ``PAGE_KEY_BYTES`` bytes."""

TokensLike = npt.ArrayLike
"""Token ids as numpy array, torch CPU tensor, ``array.array`` or a sequence of int."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Separate prefixes that share tokens but not state; two namespaces never share a page.

    The seed of the key chain holds it. With ``extra_key`` and ``cache_salt`` alone it is the seed that
    SGLang 0.5.23 computes, so that both name a page alike.
    """

    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    tenant: str | None = None

    @property
    def seed(self) -> bytes:
        """Digest that stands before the first page; empty for the default namespace."""
        shared = (self.extra_key, self.cache_salt)
        ours = (self.lora_id, self.tenant)
        if ours == (None, None):
            if shared == (None, None):
                return b""
            return hashlib.sha256(b"sglang-cache-namespace-v1" + _tagged(*shared)).digest()
        return hashlib.sha256(b"unified-cache-namespace-v1" + _tagged(*shared, *ours)).digest()


DEFAULT_NAMESPACE = Namespace()
"""No extra key, no salt, no adapter, no tenant."""


def _tagged(*fields: str | None) -> bytes:
    """Join fields so that no two combinations collide: a tag and a length before each."""
    parts: list[bytes] = []
    for field in fields:
        if field is None:
            parts.append(b"\x00")
        else:
            text = field.encode()
            parts.append(b"\x01" + len(text).to_bytes(8, "little") + text)
    return b"".join(parts)


def encode_tokens(tokens: TokensLike, page_size: int) -> bytes:
    """Convert token ids to bytes, cut to whole pages: the one place where tokens are converted.

    Returns a copy; the caller may reuse its array.

    Raises:
        TokenError: not one-dimensional, not integers, or an id outside [0, 2**31).
        ConfigError: a page size that is not positive.
    """
    if page_size <= 0:
        raise ConfigError(f"page_size must be positive, found {page_size}")
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TokenError(f"token ids must convert to a numpy array on the CPU: {error}") from error
    if ids.ndim != 1:
        raise TokenError(f"token ids must be one-dimensional, found shape {ids.shape}")
    if ids.size == 0:
        return b""
    is_encoded = ids.dtype == _ENCODED
    if not is_encoded and ids.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers in [0, 2**31), found {ids.dtype}")
    # argmin takes half the time of min, which sets up a reduction first.
    if ids[ids.argmin()] < 0 or (not is_encoded and ids[ids.argmax()] > TOKEN_ID_MAX):
        bad = int(ids[(ids < 0) | (ids > TOKEN_ID_MAX)][0])
        raise TokenError(f"token ids must be in [0, 2**31), found {bad}")
    rest = ids.size % page_size
    if rest:
        ids = ids[:-rest]
    return (ids if is_encoded else ids.astype(_ENCODED)).tobytes()


class Prompt:
    """The tokens of one request, cut to whole pages, in one namespace.

    Immutable. Page keys are computed when first asked for and then kept.
    """

    __slots__ = ("_keys", "page_size", "pages_count", "seed", "tokens")

    def __init__(self, tokens: bytes, page_size: int, seed: bytes) -> None:
        """Take whole pages of encoded tokens; ``Prompt.of`` takes what users have."""
        self.tokens = tokens
        """Whole pages only, int32 little-endian."""
        self.page_size = page_size
        self.seed = seed
        """Digest of the namespace; it stands before the first page in the key chain."""
        self.pages_count = len(tokens) // (page_size * TOKEN_BYTES)
        self._keys: tuple[PageKey, ...] | None = None

    @classmethod
    def of(cls, tokens: TokensLike, page_size: int, namespace: Namespace = DEFAULT_NAMESPACE) -> "Prompt":
        """Convert token ids; the caller may reuse its array.

        Raises:
            TokenError: not one-dimensional, not integers, or an id outside [0, 2**31).
        """
        seed = b"" if namespace is DEFAULT_NAMESPACE else namespace.seed
        return cls(encode_tokens(tokens, page_size), page_size, seed)

    def head(self, pages_count: int) -> "Prompt":
        """Return the first ``pages_count`` pages as a prompt of their own, keys included."""
        if pages_count >= self.pages_count:
            return self
        head = Prompt(self.tokens[: pages_count * self.page_size * TOKEN_BYTES], self.page_size, self.seed)
        if self._keys is not None:
            head._keys = self._keys[:pages_count]
        return head

    @property
    def keys(self) -> tuple[PageKey, ...]:
        """Key of every page, root first: ``key[i] = sha256(key[i - 1] + tokens of page i)``.

        Safe to ask for from any thread: two threads at worst compute the same chain twice.
        """
        keys = self._keys
        if keys is None:
            keys = self._keys = key_chain(self.seed, self.tokens, self.page_size)
        return keys


def key_chain(seed: bytes, tokens: bytes, page_size: int) -> tuple[PageKey, ...]:
    """Digest each page together with the key before it. ``tokens`` holds whole pages."""
    page_bytes = page_size * TOKEN_BYTES
    sha256 = hashlib.sha256
    key = seed
    keys: list[PageKey] = []
    for start in range(0, len(tokens), page_bytes):
        key = sha256(key + tokens[start : start + page_bytes]).digest()
        keys.append(key)
    return tuple(keys)
