"""Root of a store in a directory: its marker, its owner, the processes in it, its manifests, foreign files in it.

docs/format.md has the names and bytes. Nothing a client sent ever becomes a name.
"""

import errno
import fcntl
import itertools
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from google.protobuf.json_format import MessageToJson

from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.files import parse_json
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.names import check_identity
from unified_cache.storage_backends.directory.disk import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    WRITE_FLAGS,
    Disk,
    StorageFaults,
    close_quietly,
    opened,
    write_at,
)
from unified_cache.storage_backends.manifest import MANIFEST_BYTES_MAX, is_sound, parsed_manifest

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"

_IDENTITY_NAME = re.compile(r"[0-9a-f]{64}")


def identities_in(disk: Disk, root_fd: int) -> list[bytes]:
    """List the identities that have a directory."""
    return [bytes.fromhex(name) for name in disk.listdir(root_fd) if _IDENTITY_NAME.fullmatch(name)]


WRITER_ATTEMPTS_MAX = 16
"""Tries to get a temp directory of our own; one is lost each time another process sweeps it half-made."""

MARKER_NAME = "store.json"
_MADE_BY = "unified-cache"
_MARKER_BYTES_MAX = 4096
_ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TMP_NAME = "tmp"
_LOCK_NAME = "lock"


class StoreFormat(NamedTuple):
    """Format of a store in a directory, as its marker says; a store of another format is refused."""

    name: str
    """Of the store, for people too: ``file store``."""
    version: int

    @property
    def scheme(self) -> str:
        """Begin of its URL: ``file``."""
        return self.name.partition(" ")[0]


class _Writer(NamedTuple):
    """Temp directory of this process, and its lock."""

    name: str
    tmp_fd: int
    fd: int
    lock_fd: int


DECLINES_PAUSE_S = 300.0
"""Time between two lines of the log that say why pages are declined."""


KEPT_MAX = 1 << 12
"""Identities whose manifest a process remembers, and foreign places whose last line in the log it does."""


class Declines:
    """Counts pages declined for want of room or a place; the log has the reason, once in a while. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self.reason = ""
        """Of the last one."""
        self._path = path
        self._logged_s: dict[str, float] = {}
        self._guard = Lock()

    def record(self, count: int, reason: str, foreign: str = "") -> None:
        """Count pages that were declined, maybe for what is ``foreign`` in the place of their directory."""
        with self._guard:
            self.count += count
            self.reason = f"{self._path} has no {'place' if foreign else 'room'} for {count} pages: {reason}"
            if len(self._logged_s) > KEPT_MAX:
                self._logged_s.clear()
            now_s = time.monotonic()
            is_due = now_s - self._logged_s.get(foreign, -math.inf) >= DECLINES_PAUSE_S
            if is_due:
                self._logged_s[foreign] = now_s
        if is_due:
            logger.warning("%s; %d declined so far", self.reason, self.count)


class StoreRoot:
    """Open directory of a store, and the temp directory of this process in it. Owns its descriptors. Thread-safe."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        fd: int,
        expected: StoreFormat,
        new_writer: Callable[[], str],
        writer: _Writer,
        is_remade: bool,
    ) -> None:
        """See ``open_root``; a ``path`` from where this process is now is kept as one from the root."""
        self._is_remade = is_remade
        self._place = path.absolute()
        self.disk = disk
        self.path = path
        self.fd = fd
        self.restored_count = 0
        """How often something of ours was found to be removed, and made again."""
        self.foreign_count = 0
        """Links, FIFOs, directories and files of another length that stood in the place of ours."""
        self.format = expected
        self.declines = Declines(path)
        self._new_writer = new_writer
        self._writer = writer
        self.manifests: dict[bytes, Manifest] = {}
        """Of the identities that this process registered last: each goes with its directory, and comes with it."""
        self._temp_numbers = itertools.count()
        self._guard = Lock()

    @property
    def writer_fd(self) -> int:
        """Temp directory of this process."""
        return self._writer.fd

    def new_temp(self) -> str:
        """Return a name that nothing in this process's temp directory has."""
        return f"{next(self._temp_numbers):x}"

    def is_alone(self) -> bool:
        """Return whether no other process is in the store, nor what a dead one left; see ``remove_dead``."""
        return self.disk.listdir(self._writer.tmp_fd) == [self._writer.name]

    def remove_dead(self) -> None:
        """Remove the temp directories of dead processes."""
        _sweep(self.disk, self._writer.tmp_fd, self._writer.name)

    def make_directory(self, identity: bytes) -> None:
        """Make the directory of an identity if absent, and again what went with it: its manifest, the marker.

        Raise StorageError where something else stands in its place.
        """
        name = identity.hex()
        try:
            self.disk.mkdir(name, 0o700, dir_fd=self.fd)
        except FileExistsError:
            if foreign_in(self.disk, self.fd, (name,)):
                raise StorageError(self.foreign_text(name), retryable=False) from None
            return
        try:
            self.restore()
            if (manifest := self.manifests.get(identity)) is not None:
                with opened(self.disk, name, DIRECTORY_FLAGS, dir_fd=self.fd) as identity_fd:
                    _write(self, identity_fd, manifest, self.new_temp())
        except OSError:
            with suppress(OSError):  # the next one to make it brings the rest
                self.disk.rmdir(name, dir_fd=self.fd)
            raise

    def remember(self, manifest: Manifest) -> None:
        """Keep a manifest, so that it comes back with its directory; of many, the one kept first is forgotten."""
        with self._guard:
            self.manifests[manifest.identity] = manifest
            if len(self.manifests) > KEPT_MAX:
                del self.manifests[next(iter(self.manifests))]

    def foreign_text(self, place: str) -> str:
        """Return what is wrong with what stands in the place of a directory."""
        return f"{self.path / place} must be a directory of its own, found a link or a file; remove it"

    def restore(self) -> None:
        """Make again what somebody removed under the open store: marker, temp directory, maybe its own directory."""
        with self._guard:
            if self._is_remade and not self.disk.fstat(self.fd).st_nlink:
                self._remake()
            if not self.disk.access(MARKER_NAME, os.F_OK, dir_fd=self.fd):
                _write_marker(self.disk, self.fd, self.format, f"{MARKER_NAME}.{self._new_writer()}")
                self.disk.fsync(self.fd)
                self.restored_count += 1
            if not self.disk.fstat(self._writer.fd).st_nlink:
                self._reenter()
                self.restored_count += 1

    def _reenter(self) -> None:
        """Make a temp directory again, under the descriptors of the one before: another thread may be in a call."""
        entered = _enter(self.disk, self.path, self.fd, self._new_writer)
        try:
            for fd, known_fd in zip(entered[1:], self._writer[1:], strict=True):
                self.disk.dup2(fd, known_fd, inheritable=False)
        finally:
            for fd in entered[1:]:
                close_quietly(self.disk, fd)
        self._writer = self._writer._replace(name=entered.name)

    def _remake(self) -> None:
        """Make the directory again, or take one that somebody made since, under the descriptor that all know."""
        with ExitStack() as opened_files:
            fd = _make_root(self.disk, self._place, opened_files)
            _check_owner(self.path, self.disk.fstat(fd))
            _claim_root(self.disk, self.path, fd, self.format, self._new_writer())
            self.disk.dup2(fd, self.fd, inheritable=False)
        self.restored_count += 1

    def record_foreign(self) -> None:
        """Count one foreign file, which the next put replaces as it is."""
        with self._guard:
            self.foreign_count += 1

    def clear_foreign(self, path: str, object_bytes: int) -> None:
        """Take away what stands under a name unless it is an object of that length after all.

        It is moved aside first, so a put of the object meanwhile loses nothing: what was moved is looked at again,
        and a whole object goes back.
        """
        self.record_foreign()
        disk, aside = self.disk, self.new_temp()
        try:
            disk.rename(path, aside, src_dir_fd=self.fd, dst_dir_fd=self.writer_fd)
        except OSError:
            return  # It is gone, or it stays: a put says so.
        with suppress(OSError):
            status = disk.stat(aside, dir_fd=self.writer_fd, follow_symlinks=False)
            if is_whole(status.st_mode, status.st_size, object_bytes):
                disk.rename(aside, path, src_dir_fd=self.writer_fd, dst_dir_fd=self.fd)
                return
        try:
            disk.unlink(aside, dir_fd=self.writer_fd)
        except OSError:
            disk.rmtree(aside, ignore_errors=True, dir_fd=self.writer_fd)

    def close(self) -> None:
        """Remove the temp directory, give up its lock, close every descriptor."""
        _remove_writer(self.disk, self._writer.tmp_fd, self._writer.name)
        for fd in (*self._writer[1:], self.fd):
            close_quietly(self.disk, fd)


def open_root(
    disk: Disk, path: Path, expected: StoreFormat, new_writer: Callable[[], str], *, is_remade: bool = False
) -> StoreRoot:
    """Open the directory of a store, made if absent, sweep what dead processes left, and enter a temp directory.

    ``is_remade`` has ``restore`` make the directory itself again too; not where a lock on it says who may use it. Raise
    ConfigError for a path, and StorageError, having changed nothing, for a directory that cannot be used or trusted.
    """
    check_path(path)
    with StorageFaults(f"cannot open a {expected.name} in {path}"), ExitStack() as opened_files:
        root_fd = _make_root(disk, path, opened_files)
        _check_owner(path, disk.fstat(root_fd))
        _claim_root(disk, path, root_fd, expected, new_writer())
        writer = _enter(disk, path, root_fd, new_writer)
        opened_files.pop_all()
    # What cannot be swept now takes room and harms nobody; the next to open tries again.
    with suppress(OSError):
        _sweep(disk, writer.tmp_fd, writer.name)
    return StoreRoot(disk, path, root_fd, expected, new_writer, writer, is_remade)


def open_root_to_read(disk: Disk, path: Path, expected: StoreFormat) -> int:
    """Open the directory of a store, changing nothing; raise where it is none, or one of another format."""
    check_path(path)
    with StorageFaults(f"cannot open a {expected.name} in {path}"), ExitStack() as opened_files:
        root_fd = _open_in(opened_files, disk, path, _ROOT_FLAGS)
        try:
            _check_marker(disk, path, root_fd, expected)
        except FileNotFoundError as error:
            raise StorageError(
                f"{path} must be a {expected.name}, found no {MARKER_NAME} in it", retryable=False
            ) from error
        opened_files.pop_all()
    return root_fd


def _make_root(disk: Disk, path: Path, opened_files: ExitStack) -> int:
    """Open a directory, made if absent, until the stack closes it; not on the disk below one that is not mounted."""
    missing = disk.missing_mount(path)
    if missing is not None:
        raise StorageError(
            f"{path} lies on {missing}, which /etc/fstab names and where nothing is mounted; mount it", retryable=True
        )
    with suppress(FileExistsError):
        disk.makedirs(path, 0o700)
    return _open_in(opened_files, disk, path, _ROOT_FLAGS)


def _open_in(opened_files: ExitStack, disk: Disk, path: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a file or a directory until the stack closes it, unless it is given up before."""
    fd = disk.open(path, flags, 0o600, dir_fd=dir_fd)
    opened_files.callback(close_quietly, disk, fd)
    return fd


def check_path(path: Path) -> None:
    """Raise ConfigError for a path that no system takes."""
    try:
        is_path = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise ConfigError(f"the directory of a store must have a name that the system can read, found {str(path)!r}")


def _sync_parents(disk: Disk, path: Path) -> None:
    """Make the parents of a directory survive a crash, even those others made; one that we may not read is old."""
    for parent in path.absolute().parents:
        try:
            fd = disk.open(parent, _ROOT_FLAGS)
        except PermissionError:
            continue
        try:
            disk.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # A mount point of autofs, say, has no fsync.
                raise
        finally:
            close_quietly(disk, fd)


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


def _claim_root(disk: Disk, path: Path, root_fd: int, expected: StoreFormat, token: str) -> None:
    """Check the marker, or set it in a directory that holds nothing yet."""
    # lost+found stands in the root of every fresh ext file system.
    names = [name for name in disk.listdir(root_fd) if name != "lost+found"]
    drafts = [name for name in names if name.startswith(f"{MARKER_NAME}.")]
    if MARKER_NAME not in names:
        if len(drafts) != len(names):
            raise StorageError(
                f"{path} must be empty or a {expected.name}, found {len(names)} entries and no {MARKER_NAME}; "
                f"name another directory",
                retryable=False,
            )
        _sync_parents(disk, path)
        _write_marker(disk, root_fd, expected, f"{MARKER_NAME}.{token}")
    _check_marker(disk, path, root_fd, expected)
    for draft in drafts:
        with suppress(FileNotFoundError):
            disk.unlink(draft, dir_fd=root_fd)
    # The process that set the marker may have died before its name was sure to stay.
    disk.fsync(root_fd)


def _check_marker(disk: Disk, path: Path, root_fd: int, expected: StoreFormat) -> None:
    found = _read_marker(disk, root_fd)
    if found != expected:
        raise StorageError(
            f"{path}/{MARKER_NAME} must be of a {expected.name} of format_version {expected.version}, "
            f"found {'none' if found is None else f'a {found.name} of {found.version}'}; "
            f"open it with what wrote it or name another directory",
            retryable=False,
        )


def _write_marker(disk: Disk, root_fd: int, written: StoreFormat, draft: str) -> None:
    """Write the marker whole or not at all; two processes that do so at a time write the same."""
    with opened(disk, draft, WRITE_FLAGS, dir_fd=root_fd) as fd:
        text = json.dumps({"format": f"{_MADE_BY} {written.name}", "format_version": written.version})
        write_at(disk, fd, [memoryview(f"{text}\n".encode())], 0)
        disk.fsync(fd)
    # Another process that found the marker in place may have swept our draft.
    with suppress(FileNotFoundError):
        disk.rename(draft, MARKER_NAME, src_dir_fd=root_fd, dst_dir_fd=root_fd)


def _read_marker(disk: Disk, root_fd: int) -> StoreFormat | None:
    with opened(disk, MARKER_NAME, READ_FLAGS, dir_fd=root_fd) as fd:
        text = disk.read(fd, _MARKER_BYTES_MAX)
    try:
        marker = parse_json(text)
    except ValueError:
        return None
    match marker:
        case {"format": str() as name, "format_version": int() as version}:
            return StoreFormat(name.removeprefix(f"{_MADE_BY} "), version)
    return None


def _enter(disk: Disk, path: Path, root_fd: int, new_writer: Callable[[], str]) -> _Writer:
    """Make a temp directory that no other process uses, and hold its lock."""
    with suppress(FileExistsError):
        disk.mkdir(_TMP_NAME, 0o700, dir_fd=root_fd)
    with ExitStack() as opened_files:
        tmp_fd = _open_in(opened_files, disk, _TMP_NAME, DIRECTORY_FLAGS, dir_fd=root_fd)
        name, fd, lock_fd = _enter_writer(disk, path, tmp_fd, new_writer)
        opened_files.pop_all()
    return _Writer(name, tmp_fd, fd, lock_fd)


def _enter_writer(disk: Disk, path: Path, tmp_fd: int, new_writer: Callable[[], str]) -> tuple[str, int, int]:
    for _ in range(WRITER_ATTEMPTS_MAX):
        writer = new_writer()
        with suppress(FileNotFoundError, FileExistsError):
            disk.mkdir(writer, 0o700, dir_fd=tmp_fd)
            entered = _lock_writer(disk, tmp_fd, writer)
            if entered is not None:
                return writer, *entered
    raise StorageError(
        f"{path}/{_TMP_NAME} must take one more directory, but {WRITER_ATTEMPTS_MAX} tries were all undone "
        f"by other processes",
        retryable=True,
    )


def _lock_writer(disk: Disk, tmp_fd: int, writer: str) -> tuple[int, int] | None:
    """Take the lock of a directory just made; None where a sweep of another process was faster."""
    with ExitStack() as opened_files:
        writer_fd = _open_in(opened_files, disk, writer, DIRECTORY_FLAGS, dir_fd=tmp_fd)
        with suppress(BlockingIOError, FileNotFoundError):
            lock_fd = _open_in(opened_files, disk, _LOCK_NAME, WRITE_FLAGS, dir_fd=writer_fd)
            disk.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that swept us held the lock until the name was gone, so a lock that still has its name is ours.
            if disk.fstat(lock_fd).st_nlink and disk.fstat(writer_fd).st_nlink:
                opened_files.pop_all()
                return writer_fd, lock_fd
    return None


def _sweep(disk: Disk, tmp_fd: int, own: str) -> None:
    """Remove the temp directories of dead processes: those whose lock can be taken, or that never had one."""
    for writer in disk.listdir(tmp_fd):
        if writer == own:
            continue
        try:
            lock_fd = disk.open(f"{writer}/{_LOCK_NAME}", READ_FLAGS, dir_fd=tmp_fd)
        except OSError:
            _remove_unlocked(disk, tmp_fd, writer)
            continue
        try:
            disk.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_writer(disk, tmp_fd, writer)
        except BlockingIOError:
            pass
        finally:
            close_quietly(disk, lock_fd)


def _remove_unlocked(disk: Disk, tmp_fd: int, writer: str) -> None:
    """Remove a temp directory that power loss left without a lock, or an empty one: its maker tries again."""
    with suppress(OSError):
        with opened(disk, writer, DIRECTORY_FLAGS, dir_fd=tmp_fd) as writer_fd:
            names = disk.listdir(writer_fd)
            # The lock is made before anything else: a live process that made these has it by the second look.
            if names and _LOCK_NAME not in disk.listdir(writer_fd):
                _clear(disk, writer_fd, names)
        disk.rmdir(writer, dir_fd=tmp_fd)


def _remove_writer(disk: Disk, tmp_fd: int, writer: str) -> None:
    """Remove a temp directory whose lock we hold, the lock last: cut short anywhere, the next sweep goes on."""
    with suppress(OSError):
        with opened(disk, writer, DIRECTORY_FLAGS, dir_fd=tmp_fd) as writer_fd:
            _clear(disk, writer_fd, disk.listdir(writer_fd))
            if disk.listdir(writer_fd) != [_LOCK_NAME]:
                return  # Without its lock, what is left would be taken for somebody who is about to enter.
            disk.unlink(_LOCK_NAME, dir_fd=writer_fd)
        disk.rmdir(writer, dir_fd=tmp_fd)


def _clear(disk: Disk, writer_fd: int, names: Sequence[str]) -> None:
    for name in names:
        if name == _LOCK_NAME:
            continue
        try:
            disk.unlink(name, dir_fd=writer_fd)
        except (IsADirectoryError, PermissionError):
            disk.rmtree(name, ignore_errors=True, dir_fd=writer_fd)


NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR})
"""Errors of ``open`` for a link, a socket or a device without driver."""

UNREADABLE = frozenset(
    number for number, name in errno.errorcode.items() if name in {"EIO", "EACCES", "EPERM", "EUCLEAN", "EBADMSG"}
)
"""Errors that say that one object cannot be read, not that none can: a bad block, a wrong owner. By name, for Linux
alone has EUCLEAN."""


def is_whole(mode: int, size_bytes: int, object_bytes: int) -> bool:
    """Return whether a status is that of an object of a length."""
    return stat.S_ISREG(mode) and size_bytes == object_bytes


def foreign_in(disk: Disk, root_fd: int, places: Iterable[str]) -> list[str]:
    """Return which places of directories something else stands in; a link to a directory is something else."""
    foreign: list[str] = []
    for place in places:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISDIR(disk.stat(place, dir_fd=root_fd, follow_symlinks=False).st_mode):
                foreign.append(place)
    return foreign


_IN_ITS_PLACE = NOT_A_FILE | UNREADABLE | {errno.ENOENT}
"""Errors that say of one file that it is not there, is none or cannot be read."""


def write_manifest(root: StoreRoot, manifest: Manifest) -> None:
    """Write a manifest beside its pages, durably, unless the same is there; what is damaged is written again.

    Raise StorageError where another identity or layout stands under this digest.
    """
    check_identity(manifest.identity)
    identity_name = manifest.identity.hex()
    path = root.path / identity_name / MANIFEST_NAME
    with StorageFaults(f"cannot keep {path}"):
        root.restore()
        root.make_directory(manifest.identity)
        with opened(root.disk, identity_name, DIRECTORY_FLAGS, dir_fd=root.fd) as identity_fd:
            found = _read(root.disk, identity_fd)
            if found is None or not is_sound(found, manifest.identity):
                _write(root, identity_fd, manifest, root.new_temp())
                found = manifest
            if found == manifest:
                root.remember(manifest)
                return
    raise StorageError(f"{path} describes another identity or layout under the same digest", retryable=False)


def read_manifests(disk: Disk, path: Path, root_fd: int) -> dict[bytes, Manifest | None]:
    """Read the manifest of every identity in a store, None where none can be read; may raise StorageError."""
    found: dict[bytes, Manifest | None] = {}
    with StorageFaults(f"cannot list the identities in {path}"):
        for identity in identities_in(disk, root_fd):
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                opened(disk, identity.hex(), DIRECTORY_FLAGS, dir_fd=root_fd) as identity_fd,
            ):
                found[identity] = None  # where it cannot be read, nobody knows whose pages these are
                with suppress(OSError):
                    found[identity] = _read(disk, identity_fd)
    return found


def _read(disk: Disk, identity_fd: int) -> Manifest | None:
    """Read what stands under the name of a manifest, None where it is none or cannot be read."""
    try:
        with opened(disk, MANIFEST_NAME, READ_FLAGS, dir_fd=identity_fd) as fd:
            return parsed_manifest(disk.read(fd, MANIFEST_BYTES_MAX))
    except OSError as error:
        if error.errno not in _IN_ITS_PLACE:
            raise
        return None


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
