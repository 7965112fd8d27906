"""The manifest of an identity in a file store: protobuf as JSON, so that people can read it too."""

import os
from contextlib import suppress

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from unified_cache.errors import StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends._file_io import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    WRITE_FLAGS,
    storage_error,
    write_all,
)
from unified_cache.storage_backends._file_layout import MANIFEST_NAME, Root

__all__ = ["keep_manifest"]

MANIFEST_BYTES_MAX = 1 << 20
"""A larger manifest is not one of ours."""


def keep_manifest(root: Root, manifest: Manifest, temp: str) -> None:
    """Write a manifest beside its pages, durably, unless the same is there; ``temp`` is a name of its own.

    Raises:
        StorageError: what is there says something else under the same digest, or a fault.
    """
    identity_name = manifest.identity.hex()
    path = root.path / identity_name / MANIFEST_NAME
    try:
        with suppress(FileExistsError):
            os.mkdir(identity_name, 0o700, dir_fd=root.fd)
        identity_fd = os.open(identity_name, DIRECTORY_FLAGS, dir_fd=root.fd)
        try:
            text = _read(identity_fd)
            if text is None:
                _write(root, identity_fd, manifest, temp)
                return
        finally:
            os.close(identity_fd)
    except OSError as error:
        raise storage_error(error, f"cannot keep {path}") from error
    try:
        found = Parse(text, Manifest())
    except (ParseError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} must hold a manifest, found something else: {error}", retryable=False) from error
    if found != manifest:
        raise StorageError(f"{path} describes another identity or layout under the same digest", retryable=False)


def _read(identity_fd: int) -> bytes | None:
    try:
        fd = os.open(MANIFEST_NAME, READ_FLAGS, dir_fd=identity_fd)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(MANIFEST_BYTES_MAX)


def _write(root: Root, identity_fd: int, manifest: Manifest, temp: str) -> None:
    placed = False
    try:
        fd = os.open(temp, WRITE_FLAGS, 0o600, dir_fd=root.writer_fd)
        try:
            write_all(fd, [memoryview(MessageToJson(manifest).encode())])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temp, MANIFEST_NAME, src_dir_fd=root.writer_fd, dst_dir_fd=identity_fd)
        placed = True
        os.fsync(identity_fd)
        os.fsync(root.fd)
    finally:
        if not placed:
            with suppress(OSError):
                os.unlink(temp, dir_fd=root.writer_fd)
