"""What a store may know of itself beyond its pages: whose they are, and when they were last used.

The protocol of pages names an identity in every call and lists none, because an engine knows its own. A tool without
an engine does not: it asks the catalog. A backend that wants such tools offers the methods of ``Catalog`` beside
those of ``StorageBackend``; ``package.module:factory`` stores too.
"""

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from google.protobuf.json_format import Parse, ParseError

from unified_cache.errors import ConfigError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends._file_io import READ_FLAGS, storage_error
from unified_cache.storage_backends._file_layout import MANIFEST_NAME
from unified_cache.storage_backends.file import FileStorage
from unified_cache.storage_backends.protocol import StorageBackend

__all__ = ["Catalog", "FileCatalog", "UsedBetween", "catalog_of"]

MANIFEST_BYTES_MAX = 1 << 20
"""A larger manifest is not one of ours."""

_IDENTITY_NAME = re.compile(r"[0-9a-f]{64}")


class UsedBetween(NamedTuple):
    """When the least and the most recently used object of an identity were used, in nanoseconds since 1970."""

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
        """Tell when objects of an identity were used; None where there are none, or nobody knows."""
        ...


@dataclass(frozen=True, slots=True)
class FileCatalog:
    """The catalog of a file store: its directory, read anew at each question, by the two names that never change.

    ``<identity>/manifest.json`` says what the pages of an identity are; every regular file one directory below is an
    object, and its modification time is the store's recency.
    """

    path: Path

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Read every identity's manifest.

        Raises:
            StorageError: the directory cannot be listed.
        """
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise storage_error(error, f"cannot list the identities in {self.path}") from error
        return {bytes.fromhex(name): _manifest_in(self.path / name) for name in names if _IDENTITY_NAME.fullmatch(name)}

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Compare modification times. Linear in objects.

        Raises:
            StorageError: a directory cannot be listed.
        """
        times: list[int] = []
        try:
            with os.scandir(self.path / identity.hex()) as fans:
                directories = [fan.path for fan in fans if fan.is_dir(follow_symlinks=False)]
            for directory in directories:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                times.append(status.st_mtime_ns)
        except OSError as error:
            raise storage_error(error, f"cannot list {self.path}/{identity.hex()}") from error
        return UsedBetween(min(times), max(times)) if times else None


def catalog_of(storage: StorageBackend) -> Catalog:
    """Return what lists the identities of a store.

    Raises:
        ConfigError: the store offers no catalog.
    """
    if isinstance(storage, Catalog):
        return storage
    if isinstance(storage, FileStorage):
        return FileCatalog(storage.path)
    raise ConfigError(
        f"a store must say whose pages it holds, {storage.capability().name} has no manifests() and used_between(); "
        f"see unified_cache.storage_backends.catalog, or name a file: store"
    )


def _manifest_in(directory: Path) -> Manifest | None:
    """Read one manifest; None where there is none, or something else in its place."""
    try:
        fd = os.open(directory / MANIFEST_NAME, READ_FLAGS)
        with open(fd, "rb") as file:  # noqa: PTH123 -- a descriptor, not a path
            return Parse(file.read(MANIFEST_BYTES_MAX), Manifest())
    except (OSError, ParseError, UnicodeDecodeError):
        return None
