"""Sizes as people write and read them: in options, files and URLs of stores, in tables and sentences."""

import re

from unified_cache.core.errors import ConfigError

PART_BYTES = (1 << 20) + (64 << 10)
"""Content in one message: a MiB, the knee of bare gRPC streaming in Python, and the headers of the pages in it."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def parse_bytes(option: str, size: str | int) -> int:
    """Read a size: 4096, 64KiB (1024), 500MB, 1.5GiB; a ConfigError that names ``option`` if it is none."""
    found = _BYTES.fullmatch("" if isinstance(size, bool) else str(size).strip())
    if found is None:
        raise ConfigError(f"{option} must be bytes as in 4096, 500MB or 4GiB, found {size!r}")
    number, unit, binary = found.groups()
    scale = (1024 if binary else 1000) ** _UNITS[unit.upper()]
    return int(number) * scale if number.isdecimal() else int(float(number) * scale)


def bytes_text(count: int, digits: int = 1) -> str:
    """Return a size in its largest binary unit: 512 B, 1.5 KiB."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_BINARY_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:,.{digits}f} {_BINARY_UNITS[unit]}" if unit else f"{count} B"


def size_text(count: int) -> str:
    """Return a size as tables of commands have it: 512 B, 1.50 KiB."""
    return bytes_text(count, digits=2)


def bytes_literal(size: int) -> str:
    """Return a size as a file of settings has it, which ``parse_bytes`` reads exactly: 256MiB."""
    amount, unit = size, 0
    while amount and amount % 1024 == 0 and unit < len(_BINARY_UNITS) - 1:
        amount, unit = amount // 1024, unit + 1
    return f"{amount}{_BINARY_UNITS[unit]}" if unit else str(size)
