"""Files that are either whole or not there, files that others must not touch, and the JSON and TOML in them."""

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from unified_cache.core.errors import ConfigError

_KEPT_BYTES_MAX = 16 << 20
"""A revocation list of some hundred thousand certificates, or as many tokens."""


def expanded(path: str | Path) -> Path:
    """Return a path with ``~`` and ``$NAME`` replaced; ``ConfigError`` where there is no such home or variable."""
    found = Path(os.path.expandvars(path))
    if "$" in str(found):
        raise ConfigError(f"{path} must name variables that are set, found {found}")
    try:
        return found.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path} must begin with the home of a user, as ~/ where HOME is set: {error}") from error


def read_kept(path: Path, forbidden: int = 0) -> bytes:
    """Read a regular file; ``ConfigError`` where it cannot be, is too long, or its mode has a bit of ``forbidden``.

    A pipe is refused, not waited for.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            found = file.read(_KEPT_BYTES_MAX + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(f"{path} must be a file that can be read: {error.strerror}") from error
    check_kept(path, mode, forbidden)
    if len(found) > _KEPT_BYTES_MAX:
        raise ConfigError(f"{path} must have at most {_KEPT_BYTES_MAX} bytes")
    return found


def check_kept(path: Path, mode: int, forbidden: int) -> None:
    """Raise ``ConfigError`` unless a mode is that of a regular file, without a bit of ``forbidden``."""
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} must be a regular file, found {stat.filemode(mode)}")
    if mode & forbidden:
        raise ConfigError(f"{path} must be kept from others, as by chmod 600, found {stat.filemode(mode)}")


def read_up_to(path: Path, bytes_max: int) -> bytes:
    """Read a file, pipe or device that a user names; ``ConfigError`` where it has more than ``bytes_max``."""
    with path.open("rb") as file:
        found = file.read(bytes_max + 1)
    if len(found) > bytes_max:
        raise ConfigError(f"{path} must have at most {bytes_max} bytes, found more")
    return found


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file under another name first and rename it: a reader sees all of it, or the file before.

    One thread at a time for a path. ``mode`` is as ``open(2)`` takes it.

    Raises:
        OSError: it cannot be written; nothing was left behind.
    """
    with _draft_of(path, mode) as file:
        file.write(content)


def replace_whole(path: Path, content: bytes) -> None:
    """Replace a file that is there; the new one has the owner and mode of the old, and outlasts a loss of power.

    Raises:
        OSError: it cannot be written, or not be given to that owner; it is as it was.
    """
    former = path.stat()
    with _draft_of(path, stat.S_IRUSR | stat.S_IWUSR) as file:
        os.fchown(file.fileno(), former.st_uid, former.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(former.st_mode))
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)


@contextmanager
def _draft_of(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Open a file of another name, which becomes ``path`` at the end of the with block if nothing was raised."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    draft.unlink(missing_ok=True)  # of a process that was killed, and had this number
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def check_writable(directory: Path) -> None:
    """Raise OSError if files cannot be made in ``directory``, before there is something to lose."""
    draft = directory / f".{os.getpid()}.part"
    draft.open("xb").close()
    draft.unlink()


def parse_json(text: str | bytes) -> object:
    """Return the value of a JSON text; a ValueError if it is none, or nested deeper than Python reads."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError("lists or tables within each other, too deep") from None
    return value


def parse_toml(text: str) -> dict[str, object]:
    """Return the values of a TOML text; a ValueError if it is none, or nested deeper than Python reads."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables within each other, too deep") from None
