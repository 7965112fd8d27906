"""Sizes as people write them: in options, and in the URL of a store."""

import re

from unified_cache.errors import ConfigError

__all__ = ["parse_bytes"]

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def parse_bytes(option: str, text: str) -> int:
    """Read a size: 4096, 64KiB, 500MB, 1.5GiB; KiB counts 1024, KB 1000.

    Raises:
        ConfigError: it is none; the message names ``option``.

    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} must be bytes as in 4096, 500MB or 4GiB, found {text!r}")
    number, unit, binary = found.groups()
    scale = (1024 if binary else 1000) ** _UNITS[unit.upper()]
    return int(number) * scale if number.isdecimal() else int(float(number) * scale)
