"""The identities of a store that a command is about."""

from unified_cache.offline.stores import StoredIdentity, choose, identities_of
from unified_cache.storage_backends.protocol import StorageReader

__all__ = ["selected"]


def selected(storage: StorageReader, url: str, wanted: str | None) -> list[StoredIdentity]:
    """Return the identities of a store, or the one whose digest begins with ``wanted``.

    Raises:
        ConfigError: there is no such identity, or the store cannot say.
    """
    found = identities_of(storage)
    return found if wanted is None else [choose(found, url, wanted)]
