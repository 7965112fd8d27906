"""Layout of a file store beyond what every store has in its directory, and the listing of its objects.

    visits                                          a byte for each time that the store was opened
    <identity>/<first digit of key>/<key>.<pool>    one object

Keys are hex digests. Sixteen directories for one identity keep each of them short enough, and a durable batch of any
size has no more than these to sync.
"""

import re
import stat
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import NamedTuple

from unified_cache.seal import Label
from unified_cache.storage_backends.common.names import check_label, parse_page_name
from unified_cache.storage_backends.directory.descriptors import DIRECTORY_FLAGS, close_quietly
from unified_cache.storage_backends.directory.disk import Disk

__all__ = ["FANS", "ListedObject", "objects_in", "place_of"]

_FAN_DIGITS = 1
"""Leading digits of a key that name its directory."""

FANS = tuple(f"{number:0{_FAN_DIGITS}x}" for number in range(16**_FAN_DIGITS))
"""Names of all directories that an identity may have."""

_FAN_NAME = re.compile(rf"[0-9a-f]{{{_FAN_DIGITS}}}")


class ListedObject(NamedTuple):
    """One object as a listing of its directory shows it."""

    label: Label
    name: str
    object_bytes: int
    mtime_ns: int


def place_of(label: Label) -> tuple[str, str]:
    """Name the fan-out directory and the file of an object.

    Raises:
        InputError: the label names no object.
    """
    check_label(label)
    name = label.page_name
    return name[:_FAN_DIGITS], name


def objects_in(disk: Disk, root_fd: int, identity: bytes, after: str = "") -> Generator[ListedObject, None, None]:
    """List the objects of one identity in the order of their names, after one name; foreign names are passed over.

    An object is looked at only when it is asked for, so whoever wants a few pays for a few.
    """
    for fan in _names_in(disk, root_fd, identity.hex()):
        if _FAN_NAME.fullmatch(fan) and fan >= after[:_FAN_DIGITS]:
            yield from _objects_in_fan(disk, root_fd, identity, fan, after)


def _objects_in_fan(disk: Disk, root_fd: int, identity: bytes, fan: str, after: str) -> Iterator[ListedObject]:
    path = f"{identity.hex()}/{fan}"
    for name in _names_in(disk, root_fd, path):
        label = parse_page_name(identity, name) if name > after and name.startswith(fan) else None
        if label is None:
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            status = disk.stat(f"{path}/{name}", dir_fd=root_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield ListedObject(label, name, status.st_size, status.st_mtime_ns)


def _names_in(disk: Disk, root_fd: int, path: str) -> list[str]:
    """List a directory in the order of names; nothing where there is none."""
    try:
        fd = disk.open(path, DIRECTORY_FLAGS, dir_fd=root_fd)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return sorted(disk.listdir(fd))
    finally:
        close_quietly(disk, fd)
