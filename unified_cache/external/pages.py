"""Pages of an engine's host pools as views, found by arithmetic where their addresses follow a rule.

An engine says where the pages of a pool lie when it is asked, which costs it more than reading a small page costs us.
Most pools lie where ``base + slot * stride`` says, for each of a page's buffers: that is learnt once, and checked.

    buffer 0    base 0 [ slot 0 | slot 1 | slot 2 | ... ]      such as the keys of all layers
    buffer 1    base 1 [ slot 0 | slot 1 | slot 2 | ... ]      such as the values of all layers
"""

from collections.abc import Callable, Sequence
from ctypes import c_ubyte
from typing import Protocol

from unified_cache.errors import InputError

__all__ = ["AffineRows", "AskedRows", "Locate", "PageRows", "Rows", "rows_at"]

Rows = tuple[memoryview, ...]
"""Bytes of one page in the engine's memory, in the order in which they are stored."""

Locate = Callable[[Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Tells where the pages in these slots lie: addresses and sizes of all their buffers, page by page."""

PROBES_COUNT = 16
"""Slots that the rule of a pool's addresses is checked on, first and last among them."""


class PageRows(Protocol):
    """Pages of one pool in an engine's memory, by slot.

    Slots are page numbers within the pool. A pool whose memory is not its pages' bytes lends copies instead.
    """

    @property
    def buffers_bytes(self) -> tuple[int, ...]:
        """Bytes of each buffer of a page, in order."""
        ...

    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        """Return the bytes of the pages in these slots, to be read until the call that they are stored by returns.

        Raises:
            InputError: the pool has no such slot.
        """
        ...

    def rows_to_fill(self, slots: Sequence[int]) -> list[Rows]:
        """Return writable memory for the pages of these slots.

        Raises:
            InputError: the pool has no such slot.
        """
        ...

    def publish(self, slots: Sequence[int], rows: Sequence[Rows], filled: Sequence[bool]) -> None:
        """Make what was filled the pages of these slots; the others are as they were, or hold anything."""
        ...


class AffineRows:
    """Pages at ``base + slot * stride`` in each of their buffers. Views of memory that the caller keeps alive."""

    __slots__ = ("_cuts", "_slots_count", "buffers_bytes")

    def __init__(self, bases: Sequence[int], strides: Sequence[int], sizes: Sequence[int], slots_count: int) -> None:
        """Take what ``learn`` found."""
        self._cuts = tuple(
            (_memory(base, (slots_count - 1) * stride + size), stride, size)
            for base, stride, size in zip(bases, strides, sizes, strict=True)
        )
        self._slots_count = slots_count
        self.buffers_bytes = tuple(sizes)

    @classmethod
    def learn(cls, locate: Locate, slots_count: int) -> "AffineRows | None":
        """Ask where some pages lie, find the rule, and check it on the others; None where they follow none."""
        if slots_count < 1:
            return None
        step = max(1, (slots_count - 1) // (PROBES_COUNT - 2))
        slots = sorted({0, min(1, slots_count - 1), *range(0, slots_count, step), slots_count - 1})
        addresses, sizes = locate(slots)
        count, rest = divmod(len(addresses), len(slots))
        if rest or not count or len(sizes) != len(addresses):
            return None
        bases, widths = addresses[:count], sizes[:count]
        strides = [after - base for base, after in zip(bases, addresses[count : 2 * count] or bases, strict=True)]
        for number, slot in enumerate(slots):
            part = slice(number * count, (number + 1) * count)
            expected = [base + slot * stride for base, stride in zip(bases, strides, strict=True)]
            if list(addresses[part]) != expected or list(sizes[part]) != list(widths):
                return None
        if min(widths) < 1 or (slots_count > 1 and any(s < w for s, w in zip(strides, widths, strict=True))):
            return None
        return cls(bases, strides, widths, slots_count)

    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        """Return the pages themselves; nothing is copied."""
        if slots and not (min(slots) >= 0 and max(slots) < self._slots_count):
            raise InputError(f"expected slots in [0, {self._slots_count}), found {min(slots)} to {max(slots)}")
        if len(self._cuts) == 1:
            view, stride, size = self._cuts[0]
            return [(view[slot * stride : slot * stride + size],) for slot in slots]
        return [
            tuple([view[slot * stride : slot * stride + size] for view, stride, size in self._cuts]) for slot in slots
        ]

    rows_to_fill = rows_to_store

    def publish(self, slots: Sequence[int], rows: Sequence[Rows], filled: Sequence[bool]) -> None:
        """Do nothing: what was filled are the pages."""


class AskedRows:
    """Pages of a pool whose addresses follow no rule, or move: the engine is asked at every call."""

    __slots__ = ("_locate", "buffers_bytes")

    def __init__(self, locate: Locate, buffers_bytes: Sequence[int]) -> None:
        self._locate = locate
        self.buffers_bytes = tuple(buffers_bytes)

    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        """Return the pages themselves, where they lie now."""
        return rows_at(self._locate, slots) if slots else []

    rows_to_fill = rows_to_store

    def publish(self, slots: Sequence[int], rows: Sequence[Rows], filled: Sequence[bool]) -> None:
        """Do nothing: what was filled are the pages."""


def rows_at(locate: Locate, slots: Sequence[int]) -> list[Rows]:
    """Return views of the pages where the engine says that they lie.

    Raises:
        InputError: it says something else than so many buffers for each page.
    """
    addresses, sizes = locate(slots)
    count, rest = divmod(len(addresses), len(slots))
    if rest or not count or len(sizes) != len(addresses):
        raise InputError(
            f"expected as many buffers for each of {len(slots)} pages, found {len(addresses)} of {len(sizes)} sizes"
        )
    views = [_memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
    return [tuple(views[start : start + count]) for start in range(0, len(views), count)]


def _memory(address: int, size_bytes: int) -> memoryview:
    """View memory that somebody else owns."""
    return memoryview((c_ubyte * size_bytes).from_address(address)).cast("B")
