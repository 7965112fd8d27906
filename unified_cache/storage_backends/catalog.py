"""Catalog of a store: the identities that it holds, and when their pages were last used.

A tool without an engine asks it whose pages there are. A backend that wants such tools offers the methods of
``Catalog`` beside those of ``StorageReader``; ``package.module:factory`` stores too.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from unified_cache.core.errors import ConfigError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.protocol import StorageReader

__all__ = ["Catalog", "CatalogSource", "UsedBetween", "catalog_in", "catalog_of"]


class UsedBetween(NamedTuple):
    """Times at which the least and the most recently used object of an identity were used, in ns since 1970."""

    oldest_ns: int
    newest_ns: int


@runtime_checkable
class Catalog(Protocol):
    """Says which identities a store holds.

    # Behavior

    * every identity that has an object is named, and so is every one that was registered and is kept
    * an identity whose manifest is missing or cannot be read is named with None
    * times are those by which the store itself evicts; a store without recency answers None
    """

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity, by its digest."""
        ...

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Return when objects of an identity were used; None where there are none, or nobody knows."""
        ...


@runtime_checkable
class CatalogSource(Protocol):
    """A wrapper around a store: hands on what lists the identities of that store, each call made as its other calls."""

    def catalog(self) -> Catalog | None:
        """Return the catalog of the wrapped store; None where it offers none."""
        ...


def catalog_in(storage: StorageReader) -> Catalog | None:
    """Return what lists the identities of a store, wrapped or not; None where it offers no catalog."""
    if isinstance(storage, CatalogSource):
        return storage.catalog()
    return storage if isinstance(storage, Catalog) else None


def catalog_of(storage: StorageReader) -> Catalog:
    """Return what lists the identities of a store; raise ConfigError where it offers no catalog."""
    catalog = catalog_in(storage)
    if catalog is not None:
        return catalog
    raise ConfigError(
        f"a store must say whose pages it holds, {storage.capability().name} has no manifests() and used_between(); "
        f"see unified_cache.storage_backends.catalog, or name a file: store"
    )
