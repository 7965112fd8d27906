"""What a replay is asked to do, checked as a whole before anything is read, opened or allocated."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unified_cache.errors import ConfigError
from unified_cache.replay.trace import BLOCK_TOKENS

__all__ = ["ReplaySettings", "bytes_text", "memory_bytes"]

SLOT_BYTES = 9
"""What the cache keeps for every slot, used or not: free list, mark and scratch of ``SlotAllocator``."""

SEAL_BYTES = 192
"""Most that a page in host memory takes beyond its payload: header, and padding to a cache line."""

PAGES_MAX = 2**31 - 2
"""Slots are int32, and slot 0 is the padding sink."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Tier sizes and page sizes of one replay.

    Raises:
        ConfigError: a size is out of range, does not fit the trace's blocks, or exceeds the memory of the machine.

    """

    page_size: int = BLOCK_TOKENS
    """Tokens per page; a block of the trace is a whole number of pages."""
    device_pages: int = 2000
    """Pages that the device can cache."""
    host_pages: int = 20000
    """Pages that host memory can cache; 0 for no host tier."""
    storage: str | None = None
    """URL of the store; None for no storage tier."""
    storage_bytes: int | None = None
    """Cap on the store; None for what its place has."""
    page_bytes: int = 4096
    """Payload of one page."""
    with_bytes: bool = True
    """Whether payloads move and are verified; if not, the same code runs on names and slots alone."""

    def __post_init__(self) -> None:
        if self.page_size < 1 or BLOCK_TOKENS % self.page_size:
            raise ConfigError(
                f"page size must divide the trace's blocks of {BLOCK_TOKENS} tokens, found {self.page_size}"
            )
        for name, value, least in (
            ("device pages", self.device_pages, 1),
            ("host pages", self.host_pages, 0),
            ("page bytes", self.page_bytes, 1),
            ("storage bytes", self.storage_bytes, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, found {value}")
        if max(self.device_pages, self.host_pages) > PAGES_MAX:
            raise ConfigError(
                f"a tier holds at most {PAGES_MAX} pages, found {max(self.device_pages, self.host_pages)}"
            )
        if self.storage is None and self.storage_bytes is not None:
            raise ConfigError(f"storage bytes cap a store, found {self.storage_bytes} and no store")
        if self.storage is not None and not self.host_pages:
            raise ConfigError("storage is reached through host memory, found host pages 0")
        self._check_memory()

    @property
    def pages_per_block(self) -> int:
        """Pages that one block of the trace takes."""
        return BLOCK_TOKENS // self.page_size

    def _check_memory(self) -> None:
        need = (self.device_pages + self.host_pages) * SLOT_BYTES
        if self.with_bytes:
            need += (self.device_pages + 1) * self.page_bytes + (self.host_pages + 1) * (self.page_bytes + SEAL_BYTES)
            if self.storage is not None and self.storage.startswith("memory:"):
                need += self.storage_bytes or 0
        have = memory_bytes()
        if need > have:
            raise ConfigError(f"the tiers need {bytes_text(need)} of memory, found {bytes_text(have)} on this machine")


def memory_bytes() -> int:
    """Return what this process may use: physical memory, or the limit of its control group if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such limit, or the word "max"
            memory = min(memory, int(path.read_text(encoding="ascii")))
    return memory


def bytes_text(count: int) -> str:
    """Write a number of bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{count} B"
        amount /= 1024
    return f"{amount:,.1f} TiB"
