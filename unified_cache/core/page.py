"""Tokens, pages and page keys: the names of prefixes, in the tree and in every store.

Tokens are converted once, at the boundary, to ``bytes`` of little-endian int32. From there on a page is a
slice of ``page_size * TOKEN_BYTES`` bytes: hashing, comparing and splitting are memcmp and memcpy.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from numbers import Integral
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import ConfigError, InputError, TokenError, check_each, check_kind, check_text

__all__ = ["DEFAULT_NAMESPACE", "MediaItem", "Namespace", "Prompt"]

TOKEN_BYTES = 4
"""One token id, int32 little-endian."""

PAGE_KEY_BYTES = 32
"""SHA-256 digest of one page and everything before it; as SGLang 0.5.23 computes it."""

TOKEN_ID_MAX = 2**31 - 1

_ENCODED = np.dtype("<i4")

PageKey = bytes
"""Identity of a page and its whole prefix, in one namespace: ``PAGE_KEY_BYTES`` bytes."""

TokensLike: TypeAlias = npt.ArrayLike
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
    """Adapter, by a name that changes with its weights."""
    tenant: str | None = None
    bigrams: bool = field(default=False, kw_only=True)
    """Whether a page is of pairs, each token with the one after it: for engines whose draft model (EAGLE) reads the
    next token along, so that state depends on it. Keys are those of SGLang 0.5.23 under EAGLE."""

    def __post_init__(self) -> None:
        for name, value in (
            ("extra_key", self.extra_key),
            ("cache_salt", self.cache_salt),
            ("lora_id", self.lora_id),
            ("tenant", self.tenant),
        ):
            if value is not None:
                check_text(f"{name} of a namespace", value)

    @property
    def seed(self) -> bytes:
        """Digest before the first page; empty without any name, whether pages are of bigrams or not."""
        shared = (self.extra_key, self.cache_salt)
        ours = (self.lora_id, self.tenant)
        if ours == (None, None):
            if shared == (None, None):
                return b""
            return hashlib.sha256(b"sglang-cache-namespace-v1" + _tagged(*shared)).digest()
        return hashlib.sha256(b"unified-cache-namespace-v1" + _tagged(*shared, *ours)).digest()


DEFAULT_NAMESPACE = Namespace()
"""No extra key, no salt, no adapter, no tenant; pages of single tokens."""

_BIGRAMS = Namespace(bigrams=True)


def _tagged(*fields: str | None) -> bytes:
    """Join fields so that no two combinations collide: a tag and a length before each."""
    parts: list[bytes] = []
    for text in fields:
        if text is None:
            parts.append(b"\x00")
        else:
            encoded = text.encode()
            parts.append(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """Picture, sound or film behind a run of placeholder tokens, which are the same whatever stands behind them.

    Prompts share the pages before the first item in which they differ, and none from there on.
    """

    start: int
    """Number of its first placeholder token in the prompt."""
    length: int
    """Placeholder tokens."""
    digest: str
    """Digest of what the model reads there, as text, of 128 bits at least: items of one digest are one."""

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("length", self.length)):
            check_kind(value, Integral, f"the {name} of a media item as a whole number of tokens")
            object.__setattr__(self, name, int(value))  # sums of NumPy's numbers wrap around
        check_text("the digest of a media item", self.digest)
        if not self.digest:
            raise InputError("a media item needs the digest of what stands behind its tokens, found none")


PageMedia: TypeAlias = Mapping[int, tuple[MediaItem, ...]]
"""Media by the first page whose state depends on them."""

NO_MEDIA: PageMedia = {}


def place_media(media: Sequence[MediaItem], tokens_count: int, page_size: int, *, bigrams: bool) -> PageMedia:
    """Return media by page; a pair of tokens depends on its second one, too.

    Raises:
        InputError: an item does not lie within the tokens, or two overlap.
    """
    check_each(media, MediaItem, "media as a sequence of MediaItem")
    ordered = sorted(media, key=lambda item: item.start)
    end = 0
    for item in ordered:
        if item.length < 1 or item.start < end or item.start + item.length > tokens_count:
            raise InputError(
                f"a media item must lie within the tokens [{end}, {tokens_count}) that the items before it leave, "
                f"found {item.length} tokens from {item.start}"
            )
        end = item.start + item.length
    return _by_page(ordered, page_size, bigrams=bigrams)


def _by_page(ordered: Sequence[MediaItem], page_size: int, *, bigrams: bool) -> PageMedia:
    pages = groupby(ordered, lambda item: max(item.start - bigrams, 0) // page_size)
    return {page: tuple(items) for page, items in pages}


def media_between(media: PageMedia, start: int, end: int) -> PageMedia:
    """Return the media of pages [start, end)."""
    return {page: items for page, items in media.items() if start <= page < end} if media else media


def shift_media(media: PageMedia, pages: int, page_size: int) -> PageMedia:
    """Return media as a prompt has them that begins so many pages later."""
    return {
        page - pages: tuple(replace(item, start=item.start - pages * page_size) for item in items)
        for page, items in media.items()
    }


def media_mark(media: PageMedia, page: int, page_size: int) -> bytes:
    """Return what follows the tokens of a page in its name: its media. It begins as no token does."""
    marks = [
        struct.pack("<iqqq", -1, item.start - page * page_size, item.length, len(digest)) + digest
        for item in media.get(page, ())
        for digest in (item.digest.encode(),)
    ]
    return b"".join(marks)


def encode_tokens(tokens: TokensLike) -> bytes:
    """Convert token ids to bytes, a copy: the one place to convert tokens.

    Raises:
        TokenError: not one-dimensional, not integers, or an id outside [0, 2**31).
    """
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
    return (ids if is_encoded else ids.astype(_ENCODED)).tobytes()


class Prompt:
    """The tokens of one request, cut to whole pages, in one namespace.

    Immutable. Page keys are computed when first asked for and then kept.

    A page of bigrams holds the state of its pairs' first tokens, and is named by one token more. A run of pairs is its
    first token and then the second of each: so a tree has the first token in the name of the root, and the second ones
    where it has tokens otherwise.

        token ids     7    3    3    9    5    1
        pages of 2    [7 3, 3 3]  [3 9, 9 5]   5 1: part of a page, cut off
        first, tokens 7   [3    3] [9    5]
    """

    __slots__ = (
        "_keys",
        "first",
        "media",
        "namespace",
        "page_size",
        "pages_count",
        "reusable_pages",
        "root",
        "seed",
        "tokens",
        "tokens_count",
    )

    def __init__(
        self,
        tokens: bytes,
        page_size: int,
        seed: bytes,
        first: bytes = b"",
        media: PageMedia = NO_MEDIA,
        namespace: Namespace | None = None,
    ) -> None:
        """Take whole pages of encoded tokens; ``Prompt.of`` takes what users have."""
        self.tokens = tokens
        """Whole pages only, int32 little-endian; of bigrams the second tokens."""
        self.first = first
        """First token of all, encoded, where pages are of bigrams; else empty."""
        self.page_size = page_size
        self.seed = seed
        """Digest of the namespace, before the first page in the key chain."""
        self.root = seed + first
        """Name of the root that the prompt hangs below in a tree; prompts of two roots share no page."""
        self.pages_count = len(tokens) // (page_size * TOKEN_BYTES)
        self.tokens_count = self.pages_count * page_size + len(first) // TOKEN_BYTES
        """Tokens of the request, those of a partial last page included."""
        self.reusable_pages = self.pages_count
        """Pages that a request can reuse: one less than all where these leave it no token to compute, see ``of``."""
        self.media = media
        """Media by page, of those that begin in whole pages."""
        self.namespace = namespace if namespace is not None or seed else _BIGRAMS if first else DEFAULT_NAMESPACE
        """Namespace that ``seed`` is the digest of; None where nothing but that is known of it."""
        self._keys: tuple[PageKey, ...] | None = None

    @classmethod
    def of(
        cls,
        tokens: TokensLike,
        page_size: int,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        media: Sequence[MediaItem] = (),
        whole: bool = False,
    ) -> "Prompt":
        """Convert token ids, and place ``media`` behind some of them; the caller may reuse its array.

        An engine computes the last token of a prompt at least, since it wants the logits after it. So where the last
        page ends with that token, all pages but this one can be reused; as in SGLang and vLLM. ``whole`` says that all
        pages can: for users that compute no token after them, such as warm-up, backup jobs, replays, or disaggregated
        prefill.

        Raises:
            TokenError: not one-dimensional, not integers, or an id outside [0, 2**31).
            ConfigError: a page size that is not positive.
            InputError: ``namespace`` is none, or media do not lie within the tokens, each apart from the others.
        """
        if page_size <= 0:
            raise ConfigError(f"page_size must be positive, found {page_size}")
        check_kind(namespace, Namespace, "a Namespace")
        encoded = encode_tokens(tokens)
        page_bytes = page_size * TOKEN_BYTES
        start = TOKEN_BYTES if namespace.bigrams else 0
        end = len(encoded) - (len(encoded) - start) % page_bytes
        prompt = cls(encoded[start:end], page_size, namespace.seed, encoded[:start], NO_MEDIA, namespace)
        prompt.tokens_count = len(encoded) // TOKEN_BYTES
        if not isinstance(media, tuple) or media:
            placed = place_media(media, prompt.tokens_count, page_size, bigrams=namespace.bigrams)
            prompt.media = media_between(placed, 0, prompt.pages_count)
        if not whole:
            prompt.reusable_pages = max(prompt.tokens_count - 1, 0) // page_size
        return prompt

    @classmethod
    def below(
        cls,
        root: bytes,
        tokens: bytes,
        page_size: int,
        media: PageMedia = NO_MEDIA,
        namespace: Namespace | None = None,
    ) -> "Prompt":
        """Make the prompt of encoded whole pages below the root of that name."""
        seed_bytes = len(root) - len(root) % PAGE_KEY_BYTES
        return cls(tokens, page_size, root[:seed_bytes], root[seed_bytes:], media, namespace)

    def below_root(self, root: bytes, namespace: Namespace | None = None) -> "Prompt | None":
        """Return the same tokens and media below the root of another name; None where that names another first one."""
        other = Prompt.below(root, b"", self.page_size)
        tokens = self.first + self.tokens
        if not tokens.startswith(other.first):
            return None
        rest = tokens[len(other.first) :]
        whole = rest[: len(rest) - len(rest) % (self.page_size * TOKEN_BYTES)]
        items = [item for page in sorted(self.media) for item in self.media[page]]
        media = _by_page(items, self.page_size, bigrams=bool(other.first))
        return Prompt.below(root, whole, self.page_size, media, namespace)

    def differences(self, other: "Prompt") -> tuple[str, ...]:
        """Name the fields of two prompts' namespaces that differ, without their values, which may be secret."""
        if self.namespace is None or other.namespace is None:
            return ("namespace",)
        theirs = asdict(other.namespace)
        return tuple(name for name, value in asdict(self.namespace).items() if theirs[name] != value) or ("namespace",)

    def head(self, pages_count: int) -> "Prompt":
        """Return the first ``pages_count`` pages as a prompt of their own, keys included; itself if it has no more.

        All pages of a head can be reused: it leaves tokens to compute.
        """
        if pages_count >= self.pages_count:
            return self
        tokens = self.tokens[: pages_count * self.page_size * TOKEN_BYTES]
        media = media_between(self.media, 0, pages_count)
        head = Prompt(tokens, self.page_size, self.seed, self.first, media, self.namespace)
        if self._keys is not None:
            head._keys = self._keys[:pages_count]
        return head

    def begins_as(self, other: "Prompt") -> bool:
        """Return whether the pages that both have hold the same: tokens, media and what the namespace says."""
        count = min(self.pages_count, other.pages_count)
        mine, theirs = self.head(count), other.head(count)
        return (mine.tokens, mine.root, mine.media) == (theirs.tokens, theirs.root, theirs.media)

    @property
    def reusable(self) -> "Prompt":
        """The first ``reusable_pages`` as a prompt of their own."""
        return self.head(self.reusable_pages)

    @property
    def keys(self) -> tuple[PageKey, ...]:
        """Key of every page, root first: ``key[i] = sha256(key[i - 1] + tokens of page i)``; a bigram is two tokens.

        The media that begin in a page follow its tokens. Safe to ask for from any thread: two threads at worst compute
        the same chain twice.
        """
        keys = self._keys
        if keys is None:
            marks = {page: media_mark(self.media, page, self.page_size) for page in self.media}
            if self.first:
                keys = key_chain(self.seed, _bigrams(self.first + self.tokens), 2 * self.page_size, marks)
            else:
                keys = key_chain(self.seed, self.tokens, self.page_size, marks)
            self._keys = keys
        return keys


def _bigrams(tokens: bytes) -> bytes:
    """Return each token but the last together with the one after it."""
    ids = np.frombuffer(tokens, _ENCODED)
    return np.stack((ids[:-1], ids[1:]), axis=1).tobytes()


def key_chain(seed: bytes, tokens: bytes, page_size: int, marks: Mapping[int, bytes] = {}) -> tuple[PageKey, ...]:
    """Digest each page together with the key before it. ``tokens`` holds whole pages; ``marks`` follow them by page."""
    page_bytes = page_size * TOKEN_BYTES
    sha256 = hashlib.sha256
    key = seed
    keys: list[PageKey] = []
    for (page,) in struct.iter_unpack(f"{page_bytes}s", tokens):
        name = page + marks.get(len(keys), b"") if marks else page
        key = sha256(key + name).digest()
        keys.append(key)
    return tuple(keys)
