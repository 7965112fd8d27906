"""Digests of pages: eight bytes that tell a page and all before it from every other, and nothing of its tokens.

They are made of tokens where no page key is wanted, at a small part of its price. Where two pages share a digest, one
is taken for the other: that may explain a page wrongly, and must do nothing else.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from unified_cache.page import TOKEN_BYTES, PageKey, Prompt

__all__ = [
    "DIGEST_BYTES",
    "PageDigests",
    "chained_digests",
    "digests_where",
    "key_digests",
    "prompt_digests",
    "root_digest",
]

DIGEST_BYTES = 8
"""Digest of one page and all before it."""

PageDigests = bytes
"""Digests of pages, one after the other, ``DIGEST_BYTES`` each; as numbers in the byte order of this machine."""


def root_digest(root: bytes) -> PageDigests:
    """Return the digest that stands before the first page below the root of that name, see ``Prompt.root``."""
    return xxh3_64_digest(root)


def chained_digests(before: PageDigests, tokens: bytes, page_bytes: int) -> PageDigests:
    """Digest each page of encoded tokens together with all before it; the last of ``before`` is the digest of those."""
    digest = int.from_bytes(before[-DIGEST_BYTES:], sys.byteorder)
    pages = struct.iter_unpack(f"{page_bytes}s", tokens)
    return array("Q", [digest := xxh3_64_intdigest(page, digest) for (page,) in pages]).tobytes()


def prompt_digests(prompt: Prompt) -> PageDigests:
    """Digest the pages of a prompt as the tree digests them."""
    return chained_digests(root_digest(prompt.root), prompt.tokens, prompt.page_size * TOKEN_BYTES)


def key_digests(keys: Sequence[PageKey]) -> PageDigests:
    """Return the first bytes of page keys: what pages in storage are remembered by."""
    return b"".join([key[:DIGEST_BYTES] for key in keys])


def digests_where(digests: PageDigests, mask: npt.NDArray[np.bool_]) -> PageDigests:
    """Return the digests of the pages for which ``mask`` is True."""
    return np.frombuffer(digests, np.uint64)[mask].tobytes()
