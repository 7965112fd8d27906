"""Sizes: bytes as people write and read them, the memory of this machine, and the pages that a tier of bytes holds.

A tier that is sized in bytes is split between components so that all of them fill at the same prompt: by the bytes
that a typical prompt adds to each of them under the given retention.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import ModelLayout
from unified_cache.core.window import needed_pages

PART_BYTES = (1 << 20) + (64 << 10)
"""Content in one message: a MiB, the knee of bare gRPC streaming in Python, and the headers of the pages in it."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL_UNITS = ("B", "KB", "MB", "GB", "TB")
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


def short_size(count: int) -> str:
    """Return a size for a narrow table, as ``parse_bytes`` reads it: 0, 80Gi, 1.25Ti."""
    number, unit = bytes_text(count, digits=2).replace(",", "").split()
    digits = number.partition(".")[0] if float(number) >= 100 else f"{float(number):.3g}"
    return digits + unit.removesuffix("B")


def size_text(count: int) -> str:
    """Return a size as tables of commands have it: 512 B, 1.50 KiB."""
    return bytes_text(count, digits=2)


def bytes_literal(size: int) -> str:
    """Return a size as a file of settings has it, which ``parse_bytes`` reads exactly: 256MiB, 2GB."""
    shortest = str(size)
    for scale, units in ((1024, _BINARY_UNITS), (1000, _DECIMAL_UNITS)):
        amount, unit = size, 0
        while amount and amount % scale == 0 and unit < len(units) - 1:
            amount, unit = amount // scale, unit + 1
        shortest = min(shortest, f"{amount}{units[unit]}" if unit else shortest, key=len)
    return shortest


PROMPT_TOKENS = 8192
"""Tokens that a typical prompt adds; the conversation trace adds 7,780 a request that it has not seen before."""

PROMPTS_MIN = 4
"""Prompts that a tier has to hold: one that is served, one that it branches off from, and their windows."""


@dataclass(frozen=True, slots=True)
class SizedTiers:
    """A layout, and the pages of each component that a typical prompt adds to it."""

    layout: ModelLayout
    typical_pages: tuple[int, ...]
    name: str
    """Name of the model, for messages."""

    @classmethod
    def of(
        cls, layout: ModelLayout, retention: Retention, window_tokens: int | None = None, name: str = "the model"
    ) -> "SizedTiers":
        """Return the sizes under a retention; ``window_tokens`` is the model's longest window, where it has one."""
        pages = -(-max(PROMPT_TOKENS, window_tokens or 0) // layout.page_size)
        ends = retention.ends(pages, 0, layout.page_size)
        windows = [needed_pages(ends, component.span, 0, pages) for component in layout.components]
        return cls(layout, tuple(int(np.count_nonzero(window)) for window in windows), name)

    def device_pages(self, tier_bytes: int) -> tuple[int, ...]:
        """Return the pages of each component that a device of so many bytes holds; errors as ``prompts``."""
        return self._pages("device", tier_bytes, sealed=False)

    def host_pages(self, tier_bytes: int) -> tuple[int, ...]:
        """Return the pages of each component that host memory of so many bytes holds, each with its header."""
        return self._pages("host", tier_bytes, sealed=True)

    def prompts(self, tier: str, tier_bytes: int, *, sealed: bool) -> float:
        """Return how many typical prompts a tier holds; a ConfigError if too few to serve any."""
        typical = self.layout.prompt_bytes(self.typical_pages, sealed=sealed)
        least = PROMPTS_MIN * typical
        if tier_bytes < least:
            raise ConfigError(
                f"{tier}_bytes must be at least {least} ({bytes_text(least)}), {PROMPTS_MIN} prompts of "
                f"{PROMPT_TOKENS} tokens of {self.name}, found {tier_bytes}"
            )
        return tier_bytes / typical

    def _pages(self, tier: str, tier_bytes: int, *, sealed: bool) -> tuple[int, ...]:
        prompts = self.prompts(tier, tier_bytes, sealed=sealed)
        return tuple(int(prompts * pages) for pages in self.typical_pages)


ROOT = Path("/")


class _Limit(NamedTuple):
    """Limit of a control group, and how much of it is taken by what the system would not give up for others."""

    limit_bytes: int
    taken_bytes: int


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may have: physical memory, or the limit of its control groups if less."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical_bytes, *(each.limit_bytes for each in _limits(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory that may still be taken: the machine's, or that of the tightest control group if less.

    Pages of files that are cached count as available, since the system gives them up. Where a system does not say what
    is available, it is all memory.
    """
    available = [max(each.limit_bytes - each.taken_bytes, 0) for each in _limits(root)]
    with suppress(OSError, KeyError, ValueError):
        available.append(_fields(root / "proc/meminfo")["MemAvailable:"] * 1024)
    return min([memory_bytes(root), *available])


def check_available(need_bytes: int, subject: str, root: Path = ROOT) -> None:
    """Raise ConfigError where ``subject`` needs more memory than may still be taken."""
    have_bytes = available_bytes(root)
    if need_bytes > have_bytes:
        raise ConfigError(
            f"{subject} need {bytes_text(need_bytes)} of memory, found {bytes_text(have_bytes)} available"
        )


def _limits(root: Path) -> Iterator[_Limit]:
    """Yield the limits of the control groups that this process is in, of version 2 and of version 1."""
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, group = line.partition(":")
        controllers, _, path = group.partition(":")
        if not controllers:
            yield from _limits_of(top, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _limits_of(top / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _limits_of(place: Path, path: str, limit: str, used: str, prefix: str) -> Iterator[_Limit]:
    """Yield the limits on the way down to a group; in a container its own may be the top one, and others not seen."""
    for name in ["", *path.strip("/").split("/")]:
        place = place / name
        with suppress(OSError, KeyError, ValueError):  # no such group, or the word "max" for no limit
            cached = _fields(place / "memory.stat")
            files_bytes = cached[f"{prefix}inactive_file"] + cached[f"{prefix}active_file"]
            yield _Limit(int(_text(place / limit)), max(int(_text(place / used)) - files_bytes, 0))


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text(encoding="ascii").splitlines())}


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
