"""Names of objects in any store, ``<identity>/<page key>.<pool>``: checked, and read back into labels."""

import re
from functools import lru_cache

from unified_cache.core.errors import InputError
from unified_cache.core.page import PAGE_KEY_BYTES
from unified_cache.core.pool import PoolSpec
from unified_cache.core.seal import Label

IDENTITY_BYTES = 32
"""SHA-256 over identity and layout, see ``Identity.digest``."""

_KEY_DIGITS = 2 * PAGE_KEY_BYTES
_PAGE_NAME = re.compile(rf"[0-9a-f]{{{_KEY_DIGITS}}}\.[a-z0-9][a-z0-9_]{{0,31}}")


def check_label(label: Label) -> None:
    """Raise InputError for a label that names no object: a digest of another size, a pool without a name."""
    if len(label.identity) != IDENTITY_BYTES or len(label.key) != PAGE_KEY_BYTES:
        raise InputError(
            f"a label has an identity of {IDENTITY_BYTES} bytes and a key of {PAGE_KEY_BYTES}, "
            f"found {len(label.identity)} and {len(label.key)}"
        )
    check_pool(label.pool)


def check_identity(identity: bytes) -> None:
    """Raise InputError for an identity of another length than a digest's."""
    if len(identity) != IDENTITY_BYTES:
        raise InputError(f"an identity has {IDENTITY_BYTES} bytes, found {len(identity)}")


def check_scan(identity: bytes, cursor: str) -> None:
    """Raise InputError for an identity that is no digest, or a cursor that no scan returned."""
    check_identity(identity)
    if cursor and parse_page_name(identity, cursor) is None:
        raise InputError(f"a cursor is what the last scan returned, found {cursor!r}")


@lru_cache(maxsize=1024)
def check_pool(pool: str) -> None:
    """Raise InputError for the name of a pool that none can have."""
    PoolSpec(pool, 0)


def parse_page_name(identity: bytes, name: str) -> Label | None:
    """Read the name of an object within its identity back into a label; None where it is no such name."""
    if not _PAGE_NAME.fullmatch(name):
        return None
    return Label(identity, bytes.fromhex(name[:_KEY_DIGITS]), name[_KEY_DIGITS + 1 :])
