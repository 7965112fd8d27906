"""Manifests of the identities in a store in a directory: protobuf as JSON, so that people can read them too."""

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
    write_all,
)
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.layout import MANIFEST_NAME, identities_in
from unified_cache.storage_backends.directory.root import StoreRoot

__all__ = ["read_manifests", "write_manifest"]

MANIFEST_BYTES_MAX = 1 << 20
"""A larger manifest is not one of ours."""


def write_manifest(root: StoreRoot, manifest: Manifest) -> None:
    """Write a manifest beside its pages, durably, unless the same is there.

    Raises:
        InputError: the identity in the manifest is not a digest.
        StorageError: what is there says something else under the same digest, or a fault.
    """
    check_identity(manifest.identity)
    identity_name = manifest.identity.hex()
    path = root.path / identity_name / MANIFEST_NAME
    try:
        with suppress(FileExistsError):
            root.disk.mkdir(identity_name, 0o700, dir_fd=root.fd)
        identity_fd = root.disk.open(identity_name, DIRECTORY_FLAGS, dir_fd=root.fd)
        try:
            text = _read(root.disk, identity_fd)
            if text is None:
                _write(root, identity_fd, manifest, root.new_temp())
                return
        finally:
            close_quietly(root.disk, identity_fd)
    except OSError as error:
        raise storage_error(error, f"cannot keep {path}") from error
    try:
        found = Parse(text, Manifest())
    except (ParseError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} must hold a manifest, found something else: {error}", retryable=False) from error
    if found != manifest:
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
            text = _read(disk, identity_fd)
            found[identity] = None if text is None else Parse(text, Manifest())
        except (OSError, ParseError, UnicodeDecodeError):
            continue  # What is in its place says nothing of whose pages these are.
        finally:
            close_quietly(disk, identity_fd)
    return found


def _read(disk: Disk, identity_fd: int) -> bytes | None:
    try:
        fd = disk.open(MANIFEST_NAME, READ_FLAGS, dir_fd=identity_fd)
    except FileNotFoundError:
        return None
    try:
        return disk.read(fd, MANIFEST_BYTES_MAX)
    finally:
        close_quietly(disk, fd)


def _write(root: StoreRoot, identity_fd: int, manifest: Manifest, temp: str) -> None:
    disk = root.disk
    placed = False
    try:
        fd = disk.open(temp, WRITE_FLAGS, 0o600, dir_fd=root.writer_fd)
        try:
            write_all(disk, fd, [memoryview(MessageToJson(manifest).encode())])
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
