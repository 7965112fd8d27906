"""Manifests of the identities in a store in a directory: protobuf as JSON, so that people can read them too."""

import errno
from contextlib import suppress
from pathlib import Path

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from unified_cache.errors import StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.names import check_identity
from unified_cache.storage_backends.directory.descriptors import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    WRITE_FLAGS,
    close_quietly,
    storage_error,
    write_at,
)
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.foreign import NOT_A_FILE, UNREADABLE
from unified_cache.storage_backends.directory.layout import MANIFEST_NAME, identities_in
from unified_cache.storage_backends.directory.root import StoreRoot
from unified_cache.storage_backends.manifest import described_by

__all__ = ["read_manifests", "write_manifest"]

MANIFEST_BYTES_MAX = 1 << 20
"""A larger manifest is not one of ours."""

_IN_ITS_PLACE = NOT_A_FILE | UNREADABLE | {errno.ENOENT}
"""Errors that say of one file that it is not there, is none or cannot be read."""


def write_manifest(root: StoreRoot, manifest: Manifest) -> None:
    """Write a manifest beside its pages, durably, unless the same is there; what is damaged is written anew.

    Raises:
        InputError: the identity in the manifest is not a digest.
        StorageError: what is there has this digest and says something else, or a fault.
    """
    check_identity(manifest.identity)
    identity_name = manifest.identity.hex()
    path = root.path / identity_name / MANIFEST_NAME
    try:
        root.restore()
        root.make_directory(manifest.identity)
        identity_fd = root.disk.open(identity_name, DIRECTORY_FLAGS, dir_fd=root.fd)
        try:
            found = _read(root.disk, identity_fd)
            if found == manifest:
                return
            if found is None or not _is_sound(found, manifest.identity):
                _write(root, identity_fd, manifest, root.new_temp())
                return
        finally:
            close_quietly(root.disk, identity_fd)
    except OSError as error:
        raise storage_error(error, f"cannot keep {path}") from error
    raise StorageError(f"{path} describes another identity or layout under the same digest", retryable=False)


def read_manifests(disk: Disk, path: Path, root_fd: int) -> dict[bytes, Manifest | None]:
    """Read the manifest of every identity in the store in ``path``, None where there is none that can be read.

    Raises:
        StorageError: the store cannot be listed.
    """
    try:
        return _read_manifests(disk, root_fd)
    except OSError as error:
        raise storage_error(error, f"cannot list the identities in {path}") from error


def _read_manifests(disk: Disk, root_fd: int) -> dict[bytes, Manifest | None]:
    found: dict[bytes, Manifest | None] = {}
    for identity in identities_in(disk, root_fd):
        try:
            identity_fd = disk.open(identity.hex(), DIRECTORY_FLAGS, dir_fd=root_fd)
        except (FileNotFoundError, NotADirectoryError):
            continue
        found[identity] = None
        try:
            found[identity] = _read(disk, identity_fd)
        except OSError:
            continue  # Nobody knows whose pages these are.
        finally:
            close_quietly(disk, identity_fd)
    return found


def _read(disk: Disk, identity_fd: int) -> Manifest | None:
    """Read what stands under the name of a manifest, None where it is none or cannot be read."""
    try:
        fd = disk.open(MANIFEST_NAME, READ_FLAGS, dir_fd=identity_fd)
        try:
            return Parse(disk.read(fd, MANIFEST_BYTES_MAX), Manifest())
        finally:
            close_quietly(disk, fd)
    except (ParseError, UnicodeDecodeError, RecursionError):
        return None
    except OSError as error:
        if error.errno not in _IN_ITS_PLACE:
            raise
        return None


def _is_sound(found: Manifest, identity: bytes) -> bool:
    """Tell whether a manifest describes what has the digest under which it stands."""
    try:
        return found.identity == identity and described_by(found) is not None
    except StorageError:
        return False


def _write(root: StoreRoot, identity_fd: int, manifest: Manifest, temp: str) -> None:
    disk = root.disk
    placed = False
    try:
        fd = disk.open(temp, WRITE_FLAGS, 0o600, dir_fd=root.writer_fd)
        try:
            write_at(disk, fd, [memoryview(MessageToJson(manifest).encode())], 0)
            disk.fsync(fd)
        finally:
            disk.close(fd)
        disk.rename(temp, MANIFEST_NAME, src_dir_fd=root.writer_fd, dst_dir_fd=identity_fd)
        placed = True
        disk.fsync(identity_fd)
        disk.fsync(root.fd)
    finally:
        if not placed:
            with suppress(OSError):
                disk.unlink(temp, dir_fd=root.writer_fd)
