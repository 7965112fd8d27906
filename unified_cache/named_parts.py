"""Parts of a cache that a caller may name in place of making them: an identity by its model, a store by its URL."""

from collections.abc import Iterator
from contextlib import contextmanager

from unified_cache.arguments import check_kind
from unified_cache.errors import ConfigError
from unified_cache.pool import Identity
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.url import open_storage

__all__ = ["identity_of", "storage_of"]


def identity_of(identity: Identity | str) -> Identity:
    """Return the identity; that of the model if it is a name.

    Raises:
        ConfigError: it is neither.
        InputError: an empty name.
    """
    expected = 'identity as an Identity, or the name of a model, such as "my-model"'
    check_kind(identity, Identity | str, expected, ConfigError)
    return Identity(identity) if isinstance(identity, str) else identity


@contextmanager
def storage_of(storage: StorageBackend | str | None) -> Iterator[StorageBackend | None]:
    """Yield a store, opened if it is a URL; what was opened here is closed if the block raises.

    Raises:
        ConfigError: the URL names no store.
        StorageError: the store cannot be opened.
    """
    if not isinstance(storage, str):
        expected = 'storage as a StorageBackend, or the URL of a store, such as "file:/var/cache/kv"'
        check_kind(storage, StorageBackend | None, expected, ConfigError)
        yield storage
        return
    opened = open_storage(storage)
    try:
        yield opened
    except BaseException:
        opened.close()
        raise
