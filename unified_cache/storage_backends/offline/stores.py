"""Opens stores for tools, and lists the identities in them."""

from collections.abc import Mapping
from dataclasses import dataclass

from unified_cache.core.errors import ConfigError, StorageError, without_secrets
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.directory.disk import StorageFaults
from unified_cache.storage_backends.directory.front import DirectoryAddress, parse_address
from unified_cache.storage_backends.directory.root import MARKER_NAME
from unified_cache.storage_backends.file.page_reader import FileReader
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import Description, described_by
from unified_cache.storage_backends.packed.reader import PackedReader
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import open_storage, split_choice
from unified_cache.storage_backends.wrappers.coded import CodedStorage

DIRECTORY_STORES: Mapping[str, type[FileStorage | PackedStorage]] = {"file": FileStorage, "packed": PackedStorage}
"""Stores in a directory, by scheme."""

DIRECTORY_READERS: Mapping[str, type[FileReader | PackedReader]] = {"file": FileReader, "packed": PackedReader}
"""The same, opened to be read alone."""


SHARED_STORES = frozenset({"az", "grpc", "grpcs", "gs", "mooncake", "s3"})
"""Schemes of stores that other machines share."""

SHORT_NAME_DIGITS = 12
"""Digits shown of a digest's 64 hex digits; any unique beginning names an identity."""


@dataclass(frozen=True, slots=True)
class Undescribed:
    """Reason why the pages of an identity cannot be described."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """One identity that a store holds."""

    digest: bytes
    description: Description | Undescribed

    @property
    def name(self) -> str:
        """Name for tables: the model, or the digest if no manifest names it."""
        if isinstance(self.description, Undescribed):
            return self.digest.hex()
        return self.description.identity.model

    @property
    def short_name(self) -> str:
        """First digits of the digest, as tables show them and every command takes them."""
        return self.digest.hex()[:SHORT_NAME_DIGITS]

    def described(self) -> Description:
        """Return the description that the manifest gives; raise StorageError where none can be read."""
        if isinstance(self.description, Undescribed):
            raise StorageError(self.description.reason, retryable=False)
        return self.description


def open_to_write(url: str, bytes_max: int | None = None) -> Store:
    """Open a store, made if it is not there yet; the caller closes it. Raise as ``open_storage``."""
    return open_storage(url, bytes_max=bytes_max, must_write=True)


def open_existing(url: str, bytes_max: int | None = None) -> Store:
    """Open a store that must be there already, to remove objects from it; the caller closes it.

    Objects are read as they are, coded or not. A tool reads in the order of names; a store in a directory does not
    count that as use, other stores may. Raises ConfigError where no store is there, StorageError where it cannot be
    opened, or is a packed one in use.
    """
    if (named := _existing(url)) is not None:
        scheme, address = named
        return DIRECTORY_STORES[scheme].open(
            address.path, bytes_max=bytes_max, free_bytes_min=address.free_bytes_min, records_reads=False
        )
    return open_to_write(split_choice(url)[0], bytes_max)


def has_cap_of_its_own(url: str) -> bool:
    """Return whether a store takes no cap from who opens it: Mooncake, what a service keeps, and a bucket."""
    return url.partition(":")[0] in SHARED_STORES


def open_to_read(url: str) -> Store:
    """Open a store that must be there already, to read its objects as they are, coded or not; the caller closes it.

    A store in a directory is not changed in any way, and may be in use, on a mount that cannot be written, or somebody
    else's. Other stores may count reads as use. Raises ConfigError where no store is there, StorageError as it opens.
    """
    if (named := _existing(url)) is not None:
        scheme, address = named
        return DIRECTORY_READERS[scheme].open(address.path)
    return open_to_write(split_choice(url)[0])


def open_pages_to_read(url: str) -> Store:
    """Open a store as ``open_to_read`` to read its pages, decoded as the URL says.

    Raises besides ConfigError where the keys that the URL names cannot be had.
    """
    if _directory_of(url) is None:
        return open_to_write(url)
    objects = open_to_read(url)
    try:
        return CodedStorage(objects, split_choice(url)[1])
    except BaseException:
        objects.close()
        raise


def identities_of(storage: Store) -> list[StoredIdentity]:
    """List the identities of a store, in the order of their digests; raise ConfigError where it names none."""
    found = storage.manifests()
    if found is None:
        raise ConfigError(
            f"a store must say whose pages it holds, {storage.capability().name} has no manifests(); name a file: store"
        )
    return [_kept(digest, manifest) for digest, manifest in sorted(found.items())]


def selected(storage: Store, url: str, wanted: str | None) -> list[StoredIdentity]:
    """Return the identities of a store, or the one that ``choose`` returns for ``wanted``."""
    return identities_of(storage) if wanted is None else [choose(storage, url, wanted)]


def choose(storage: Store, url: str, wanted: str | None) -> StoredIdentity:
    """Return the identity whose digest begins with ``wanted`` in hex, or the only one; else raise ConfigError."""
    found = identities_of(storage)
    # An empty one, as of a variable of a shell that is not set, names none.
    matching = [kept for kept in found if wanted is None or (wanted and kept.digest.hex().startswith(wanted.lower()))]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(f"{kept.short_name} ({kept.name})" for kept in found) or "none"
    if wanted is None:
        raise ConfigError(f"{without_secrets(url)} must hold one identity unless --identity names one, found: {listed}")
    raise ConfigError(
        f"--identity must begin exactly one digest in {without_secrets(url)}, "
        f"{wanted!r} begins {len(matching)} of: {listed}"
    )


def _kept(digest: bytes, manifest: Manifest | None) -> StoredIdentity:
    if manifest is None:
        reason = (
            f"identity {digest.hex()} has no manifest that can be read; the engine that wrote it can register it again"
        )
        return StoredIdentity(digest, Undescribed(reason))
    if manifest.identity != digest:
        return StoredIdentity(
            digest, Undescribed(f"identity {digest.hex()} has the manifest of {manifest.identity.hex()}")
        )
    try:
        return StoredIdentity(digest, described_by(manifest))
    except StorageError as error:
        return StoredIdentity(digest, Undescribed(str(error)))


def check_apart(source_url: str, target_url: str) -> None:
    """Raise ConfigError where two URLs name one store, however spelled, or one directory lies within the other."""
    source, target = _directory_of(source_url), _directory_of(target_url)
    if source is not None and target is not None:
        one, other = source[1].path.resolve(), target[1].path.resolve()
        is_apart = not (one.is_relative_to(other) or other.is_relative_to(one))
    else:
        is_apart = split_choice(source_url)[0] != split_choice(target_url)[0]
    if not is_apart:
        raise ConfigError(
            "SRC and DST must be two stores, neither of them within the other, "
            f"found {without_secrets(source_url)} and {without_secrets(target_url)}"
        )


def is_absent(url: str) -> bool:
    """Return whether a URL names a directory in which nothing is yet."""
    named = _directory_of(url)
    return named is not None and not named[1].path.exists()


def _directory_of(url: str) -> tuple[str, DirectoryAddress] | None:
    """Return scheme and address of a store in a directory; None of any other."""
    scheme, _, rest = split_choice(url)[0].partition(":")
    return (scheme, parse_address(rest, scheme)) if scheme in DIRECTORY_STORES else None


def _existing(url: str) -> tuple[str, DirectoryAddress] | None:
    """Return the same, and refuse a directory that holds no store: opening would create one, which a tool must not."""
    named = _directory_of(url)
    if named is None:
        return None
    scheme, address = named
    with StorageFaults(f"cannot read the directory of {without_secrets(url)}"):
        if not address.path.is_dir():
            raise ConfigError(
                f"{without_secrets(url)} must be a {scheme} store, "
                f"found {'a file' if address.path.exists() else 'nothing there'}"
            )
        if not (address.path / MARKER_NAME).exists():
            raise ConfigError(f"{without_secrets(url)} must be a {scheme} store, found no {MARKER_NAME} in it")
    return named
