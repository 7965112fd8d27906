"""Address of a store in a directory: the text after ``file:`` or ``packed:`` in its URL.

    DIR                  a directory, relative or absolute
    DIR?free=SIZE        the same, and a put is declined that would leave less than that free on the file system

A size is written as options have it: ``free=1GiB``, ``free=0``. What stands after the last question mark are options; a
directory with one in its name is written with another one behind it.
"""

from pathlib import Path
from typing import NamedTuple

from unified_cache.byte_sizes import parse_bytes
from unified_cache.errors import ConfigError

__all__ = ["FREE_BYTES_MIN", "DirectoryAddress", "check_limits", "parse_address"]

FREE_BYTES_MIN = 64 << 20
"""Free space that a store leaves on the file system, unless the caller says otherwise."""


class DirectoryAddress(NamedTuple):
    """Directory of a store, and the free space that it leaves."""

    path: Path
    free_bytes_min: int


def check_limits(bytes_max: int | None, free_bytes_min: int) -> None:
    """Refuse a cap or a floor that cannot be.

    Raises:
        ConfigError: one of them is negative.
    """
    for name, value in (("bytes_max", bytes_max), ("free_bytes_min", free_bytes_min)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} must not be negative, found {value}")


def parse_address(rest: str, scheme: str = "file") -> DirectoryAddress:
    """Read the text after ``file:``, or after another scheme with the same forms.

    Raises:
        ConfigError: there is no directory or a host, an option is unknown, or a size is none.
    """
    directory, mark, options = rest.rpartition("?")
    if not mark:
        directory, options = rest, ""
    if not directory:
        raise ConfigError(f"{scheme}: needs a directory after the colon, as in {scheme}:/var/cache/pages")
    if directory.startswith("//") and not directory.startswith("///"):
        bare = directory.lstrip("/")
        raise ConfigError(
            f"{scheme}: names no host: expected {scheme}:{bare} or, from the root, {scheme}:/{bare}, "
            f"found {scheme}:{directory}"
        )
    return DirectoryAddress(Path(directory), _free_bytes_in(options, scheme) if options else FREE_BYTES_MIN)


def _free_bytes_in(options: str, scheme: str) -> int:
    name, _, size = options.partition("=")
    if name != "free":
        raise ConfigError(f"{scheme}: knows the option free=SIZE alone after the question mark, found {options!r}")
    return parse_bytes(f"free= of {scheme}:", size)
