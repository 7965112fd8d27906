"""Where things stand in the directory of a file store, who may use it, and what its names mean.

    store.json                         format version; a directory without it is not ours
    tmp/<writer>/                      files in the making of one process, gone when it closes
    tmp/<writer>/lock                  held by flock while that process lives
    <identity>/manifest.json           what the pages of one identity are
    <identity>/<first byte of key>/<key>.<pool>   one object

Identities and keys are hex digests; nothing a client sent ever becomes a name.
"""

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from unified_cache.errors import InputError, StorageError
from unified_cache.page import PAGE_KEY_BYTES
from unified_cache.pool import PoolSpec
from unified_cache.seal import Label
from unified_cache.storage_backends._file_io import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    WRITE_FLAGS,
    names_in,
    storage_error,
    write_all,
)

__all__ = ["IDENTITY_BYTES", "MANIFEST_NAME", "Found", "Root", "label_of", "objects_in", "open_root", "place_of"]

IDENTITY_BYTES = 32
"""SHA-256 over identity and layout, see ``Identity.digest``."""

MANIFEST_NAME = "manifest.json"

STORE_FORMAT_VERSION = 1
"""Version of this layout; another one is refused."""

WRITER_ATTEMPTS_MAX = 16
"""Tries to get a temp directory of our own; one is lost each time another process sweeps it half-made."""

_MARKER_NAME = "store.json"
_MARKER_BYTES_MAX = 4096
_TMP_NAME = "tmp"
_LOCK_NAME = "lock"
_IDENTITY_NAME = re.compile(r"[0-9a-f]{64}")
_FAN_NAME = re.compile(r"[0-9a-f]{2}")
_OBJECT_NAME = re.compile(r"[0-9a-f]{64}\.[a-z0-9][a-z0-9_]{0,31}")


class Root(NamedTuple):
    """The open directory of a store, and this process's temp directory in it. Owns its file descriptors."""

    path: Path
    fd: int
    tmp_fd: int
    writer: str
    writer_fd: int
    lock_fd: int

    def close(self) -> None:
        """Remove the temp directory, give up its lock, close every descriptor."""
        _remove_writer(self.tmp_fd, self.writer)
        for fd in (self.lock_fd, self.writer_fd, self.tmp_fd, self.fd):
            os.close(fd)


class Found(NamedTuple):
    """One object as a listing of its directory shows it."""

    label: Label
    name: str
    object_bytes: int
    mtime_ns: int


def place_of(label: Label) -> tuple[str, str]:
    """Name the fan-out directory and the file of an object.

    Raises:
        InputError: a digest of another size, or what cannot be the name of a pool.
    """
    if len(label.identity) != IDENTITY_BYTES or len(label.key) != PAGE_KEY_BYTES:
        raise InputError(
            f"a label has an identity of {IDENTITY_BYTES} bytes and a key of {PAGE_KEY_BYTES}, "
            f"found {len(label.identity)} and {len(label.key)}"
        )
    _check_pool(label.pool)
    key = label.key.hex()
    return key[:2], f"{key}.{label.pool}"


@lru_cache(maxsize=1024)
def _check_pool(pool: str) -> None:
    PoolSpec(pool, 0)


def label_of(identity: bytes, name: str) -> Label | None:
    """Read the name of a file back into a label; None where it is not the name of an object."""
    if not _OBJECT_NAME.fullmatch(name):
        return None
    key, pool = name.split(".")
    return Label(identity, bytes.fromhex(key), pool)


def objects_in(root_fd: int, identity: bytes, after: str = "") -> Iterator[Found]:
    """List the objects of one identity in the order of their names, after one name; foreign names are passed over."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for fan in _fans(root_fd, identity.hex(), after[:2]):
            yield from _objects_in_fan(root_fd, identity, fan, after)


def identities_in(root_fd: int) -> list[bytes]:
    """List the identities that have a directory."""
    return [bytes.fromhex(name) for name in names_in(root_fd) if _IDENTITY_NAME.fullmatch(name)]


def _fans(root_fd: int, identity_name: str, first: str) -> list[str]:
    fd = os.open(identity_name, DIRECTORY_FLAGS, dir_fd=root_fd)
    try:
        return sorted(name for name in names_in(fd) if _FAN_NAME.fullmatch(name) and name >= first)
    finally:
        os.close(fd)


def _objects_in_fan(root_fd: int, identity: bytes, fan: str, after: str) -> list[Found]:
    found: list[Found] = []
    try:
        fd = os.open(f"{identity.hex()}/{fan}", DIRECTORY_FLAGS, dir_fd=root_fd)
    except (FileNotFoundError, NotADirectoryError):
        return found
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                label = label_of(identity, entry.name) if entry.name > after and entry.name[:2] == fan else None
                if label is None:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append(Found(label, entry.name, status.st_size, status.st_mtime_ns))
    finally:
        os.close(fd)
    found.sort(key=lambda object_: object_.name)
    return found


def open_root(path: Path, new_writer: Callable[[], str]) -> Root:
    """Open the directory of a store, made if absent, sweep what dead processes left, and enter a temp directory.

    Raises:
        StorageError: it cannot be made or written, belongs to somebody else, may be written by others, holds
            something else than a store, or a store of another format. It was not changed.
    """
    opened: list[int] = []
    try:
        created = _make_directory(path)
        root_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(root_fd)
        if created:
            _sync_path(path.parent)
        _check_owner(path, os.fstat(root_fd))
        _claim_root(path, root_fd, new_writer())
        with suppress(FileExistsError):
            os.mkdir(_TMP_NAME, 0o700, dir_fd=root_fd)
        tmp_fd = os.open(_TMP_NAME, DIRECTORY_FLAGS, dir_fd=root_fd)
        opened.append(tmp_fd)
        writer, writer_fd, lock_fd = _enter_writer(path, tmp_fd, new_writer)
        opened += [writer_fd, lock_fd]
        _sweep(tmp_fd, writer)
    except OSError as error:
        for fd in opened:
            os.close(fd)
        raise storage_error(error, f"cannot open a file store in {path}") from error
    except StorageError:
        for fd in opened:
            os.close(fd)
        raise
    return Root(path, root_fd, tmp_fd, writer, writer_fd, lock_fd)


def _make_directory(path: Path) -> bool:
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        return False
    return True


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"{path} must belong to user {os.geteuid()}, who runs this process, found owner {status.st_uid}; "
            f"chown it or name another directory",
            retryable=False,
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            f"{path} must be writable by its owner alone, found mode {stat.S_IMODE(status.st_mode):04o}; "
            f"run chmod 0700 on it or name another directory",
            retryable=False,
        )


def _claim_root(path: Path, root_fd: int, token: str) -> None:
    """Check the marker, or set it in a directory that holds nothing yet."""
    # lost+found stands in the root of every fresh ext file system.
    names = [name for name in names_in(root_fd) if name != "lost+found"]
    drafts = [name for name in names if name.startswith(f"{_MARKER_NAME}.")]
    if _MARKER_NAME not in names:
        if len(drafts) != len(names):
            raise StorageError(
                f"{path} must be empty or a file store, found {len(names)} entries and no {_MARKER_NAME}; "
                f"name another directory",
                retryable=False,
            )
        _write_marker(root_fd, f"{_MARKER_NAME}.{token}")
    found = _read_marker(root_fd)
    if found != STORE_FORMAT_VERSION:
        raise StorageError(
            f"{path}/{_MARKER_NAME} must say format_version {STORE_FORMAT_VERSION}, found {found}; "
            f"open it with the version that wrote it or name another directory",
            retryable=False,
        )
    for draft in drafts:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=root_fd)


def _write_marker(root_fd: int, draft: str) -> None:
    """Write the marker whole or not at all; two processes that do so at a time write the same."""
    fd = os.open(draft, WRITE_FLAGS, 0o600, dir_fd=root_fd)
    try:
        text = json.dumps({"format": "unified-cache file store", "format_version": STORE_FORMAT_VERSION})
        write_all(fd, [memoryview(f"{text}\n".encode())])
        os.fsync(fd)
    finally:
        os.close(fd)
    # Another process that found the marker in place may have swept our draft.
    with suppress(FileNotFoundError):
        os.rename(draft, _MARKER_NAME, src_dir_fd=root_fd, dst_dir_fd=root_fd)
    os.fsync(root_fd)


def _read_marker(root_fd: int) -> object:
    """Return the format version that the marker says, None where it says none."""
    fd = os.open(_MARKER_NAME, READ_FLAGS, dir_fd=root_fd)
    try:
        marker: object = json.loads(os.read(fd, _MARKER_BYTES_MAX))
    except ValueError:
        return None
    finally:
        os.close(fd)
    return marker.get("format_version") if isinstance(marker, dict) else None


def _enter_writer(path: Path, tmp_fd: int, new_writer: Callable[[], str]) -> tuple[str, int, int]:
    """Make a temp directory that no other process uses, and hold its lock."""
    for _ in range(WRITER_ATTEMPTS_MAX):
        writer = new_writer()
        with suppress(FileNotFoundError, FileExistsError):
            os.mkdir(writer, 0o700, dir_fd=tmp_fd)
            entered = _lock_writer(tmp_fd, writer)
            if entered is not None:
                return writer, *entered
    raise StorageError(
        f"{path}/{_TMP_NAME} must take one more directory, but {WRITER_ATTEMPTS_MAX} tries were all undone "
        f"by other processes",
        retryable=True,
    )


def _lock_writer(tmp_fd: int, writer: str) -> tuple[int, int] | None:
    """Take the lock of a directory just made; None where a sweep of another process was faster."""
    writer_fd = os.open(writer, DIRECTORY_FLAGS, dir_fd=tmp_fd)
    lock_fd = -1
    try:
        lock_fd = os.open(_LOCK_NAME, WRITE_FLAGS, 0o600, dir_fd=writer_fd)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever swept us held the lock until the name was gone, so a lock that still has its name is ours.
        if os.fstat(lock_fd).st_nlink and os.fstat(writer_fd).st_nlink:
            return writer_fd, lock_fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(writer_fd)
        if lock_fd >= 0:
            os.close(lock_fd)
        raise
    os.close(writer_fd)
    if lock_fd >= 0:
        os.close(lock_fd)
    return None


def _sweep(tmp_fd: int, own: str) -> None:
    """Remove the temp directories of dead processes: those whose lock can be taken, or that never had one."""
    for writer in names_in(tmp_fd):
        if writer == own:
            continue
        try:
            lock_fd = os.open(f"{writer}/{_LOCK_NAME}", READ_FLAGS, dir_fd=tmp_fd)
        except OSError:
            # No lock yet: removed only while empty, so that its maker, if alive, notices and tries again.
            with suppress(OSError):
                os.rmdir(writer, dir_fd=tmp_fd)
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_writer(tmp_fd, writer)
        except BlockingIOError:
            pass
        finally:
            os.close(lock_fd)


def _remove_writer(tmp_fd: int, writer: str) -> None:
    """Remove a temp directory whose lock we hold, the lock last: cut short anywhere, the next sweep goes on."""
    with suppress(OSError):
        writer_fd = os.open(writer, DIRECTORY_FLAGS, dir_fd=tmp_fd)
        try:
            for name in names_in(writer_fd):
                if name == _LOCK_NAME:
                    continue
                try:
                    os.unlink(name, dir_fd=writer_fd)
                except (IsADirectoryError, PermissionError):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=writer_fd)
            os.unlink(_LOCK_NAME, dir_fd=writer_fd)
        finally:
            os.close(writer_fd)
        os.rmdir(writer, dir_fd=tmp_fd)
