"""A store around another: it passes every call on, and a layer overrides what it changes. As the layers of OpenDAL."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from unified_cache.core.seal import Label
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.catalog import Catalog, UsedBetween, catalog_in, catalog_of
from unified_cache.storage_backends.protocol import (
    Answer,
    Capability,
    Level,
    PageIO,
    ReasonedStorage,
    Scan,
    StorageBackend,
    StorageReader,
)
from unified_cache.storage_backends.removals import RemovalFeed, removals_of

__all__ = ["Method", "ReaderLayer", "StorageLayer"]

Result = TypeVar("Result")
Wrapped = TypeVar("Wrapped", bound=StorageReader)


class Method(Enum):
    """A method of ``StorageBackend`` or of ``Catalog``: what a wrapper counts, times, delays or names in a message."""

    CAPABILITY = "capability"
    REGISTER = "register"
    EXISTS = "exists"
    GET = "get"
    PUT = "put"
    TOUCH = "touch"
    REMOVE = "remove"
    CLEAR = "clear"
    SCAN = "scan"
    MANIFESTS = "manifests"
    USED_BETWEEN = "used_between"
    CLOSE = "close"

    __hash__ = object.__hash__  # see Answer


class ReaderLayer(Generic[Wrapped]):
    """Pass the calls that read a store, and its catalog, on to the wrapped one, which it closes; by ``_call``."""

    def __init__(self, backend: Wrapped) -> None:
        self._backend = backend

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        """Make one call to the wrapped backend; a layer that does something about every call overrides this."""
        return work()

    def capability(self) -> Capability:
        """Return what the wrapped backend can do."""
        return self._call(Method.CAPABILITY, self._backend.capability)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend."""
        return self._call(Method.EXISTS, partial(self._backend.exists, labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers."""
        return self._call(Method.GET, partial(self._backend.get, pages))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend."""
        return self._call(Method.SCAN, partial(self._backend.scan, identity, cursor))

    def catalog(self) -> Catalog | None:
        """Return this layer, each call made as the others; None where the wrapped backend has no catalog."""
        return None if catalog_in(self._backend) is None else self

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity of the wrapped backend, by its digest."""
        return self._call(Method.MANIFESTS, catalog_of(self._backend).manifests)

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Ask the wrapped backend when objects of an identity were used."""
        return self._call(Method.USED_BETWEEN, partial(catalog_of(self._backend).used_between, identity))

    def close(self) -> None:
        """Close the wrapped backend."""
        self._call(Method.CLOSE, self._backend.close)


class StorageLayer(ReaderLayer[StorageBackend]):
    """Pass every call of a store, and of its catalog, on to the wrapped one."""

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend."""
        self._call(Method.REGISTER, partial(self._backend.register, manifest, slabs))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages."""
        return self._call(Method.PUT, partial(self._backend.put, pages, level))

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent in the wrapped backend."""
        self._call(Method.TOUCH, partial(self._backend.touch, labels))

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects from the wrapped backend."""
        return self._call(Method.REMOVE, partial(self._backend.remove, labels))

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity from the wrapped backend."""
        return self._call(Method.CLEAR, partial(self._backend.clear, identity))

    @property
    def decline_reason(self) -> str:
        """Why the wrapped backend last declined a put; empty where it has not, or does not say."""
        return self._backend.decline_reason if isinstance(self._backend, ReasonedStorage) else ""

    def removals(self) -> RemovalFeed | None:
        """Subscribe to the removals of the wrapped backend, which waits for nothing."""
        return removals_of(self._backend)
