"""Catalog of a wrapped store, asked through its wrapper: bounded, counted or refused as every other call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.catalog import Catalog, UsedBetween, catalog_in
from unified_cache.storage_backends.protocol import StorageReader
from unified_cache.storage_backends.wrappers.method import Method

__all__ = ["WrappedCatalog"]

Result = TypeVar("Result")


class CatalogPassage(Protocol):
    """The way of a wrapper to make one call of the store that it wraps."""

    def __call__(self, method: Method, work: Callable[[], Result], /) -> Result:
        """Make the call, and return or raise what it does."""
        ...


@dataclass(frozen=True, slots=True)
class WrappedCatalog:
    """The catalog of a wrapped store; ``passage`` makes each of its calls. A ``Catalog``."""

    catalog: Catalog
    passage: CatalogPassage

    @classmethod
    def of(cls, storage: StorageReader, passage: CatalogPassage) -> "WrappedCatalog | None":
        """Return the catalog of a store as its wrapper asks it; None where the store has none."""
        catalog = catalog_in(storage)
        return None if catalog is None else cls(catalog, passage)

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity of the wrapped store, by its digest."""
        return self.passage(Method.MANIFESTS, self.catalog.manifests)

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Ask the wrapped store when objects of an identity were used."""
        return self.passage(Method.USED_BETWEEN, lambda: self.catalog.used_between(identity))
