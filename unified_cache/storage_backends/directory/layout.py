"""Layout of the directory of every store: its files by name, and the listing of its identities.

    store.json                  format and its version; a directory without it is not ours
    tmp/<writer>/               files in the making of one process, gone when it closes
    tmp/<writer>/lock           held by flock while that process lives
    <identity>/manifest.json    what the pages of one identity are

Identities are hex digests; nothing a client sent ever becomes a name. How the pages of an identity lie beside its
manifest is the store's: see ``file.layout`` and ``packed.segment``.
"""

import re

from unified_cache.storage_backends.directory.disk import Disk

__all__ = ["MANIFEST_NAME", "identities_in"]

MANIFEST_NAME = "manifest.json"

_IDENTITY_NAME = re.compile(r"[0-9a-f]{64}")


def identities_in(disk: Disk, root_fd: int) -> list[bytes]:
    """List the identities that have a directory."""
    return [bytes.fromhex(name) for name in disk.listdir(root_fd) if _IDENTITY_NAME.fullmatch(name)]
