"""Pages of a get, laid end to end into the caller's shared memory.

What a store has in memory itself, such as files that the system keeps, is read straight into its place, by the thread
that answers the call: that waits for nothing, so nothing is left to write there later. It is verified there, with a
header that the caller cannot reach. The caller may change the payload meanwhile, and then reads what it wrote; or makes
the server find a flaw, and then the page is read once more, into the server's own memory, before anybody believes that.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unified_cache.page import PageKey
from unified_cache.seal import HEADER_BYTES, Label, relabelled
from unified_cache.service.requests.calls import ServedCall
from unified_cache.service.requests.checks import NamedRun
from unified_cache.service.store.tiered import FoundTier, TieredStore
from unified_cache.storage_backends.memory_reads import targets_of
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.remote.reasons import reason_of
from unified_cache.wire.calls import SHARED_PART_BYTES
from unified_cache.wire.parts import SharedParts, mark
from unified_cache.wire.sharing import SharedSlice

__all__ = ["PageAnswer", "placed_messages", "read_pages"]

PLACED_BYTES = 2 << 20
"""Read into shared memory before a message says so: the caller copies these while the next ones are read."""

PageAnswer = tuple[bytes, Sequence[memoryview]]
"""``mark`` of one page, and its bytes where it was found, named as the caller does."""


class _PlacedPage(NamedTuple):
    """A page as the store names it, and its place in shared memory, without the header."""

    label: Label
    parent: PageKey | None
    rows: tuple[memoryview, ...]


def read_pages(store: TieredStore, tenant: str, run: NamedRun, numbers: range) -> Iterator[PageAnswer]:
    """Read pages of a run into memory of the server's; those of another length than theirs are misses."""
    if run.claimed_bytes != run.object_bytes:
        yield bytes(len(numbers)), ()
        return
    stored = run.stored[numbers.start : numbers.stop]
    found = store.read(tenant, stored, [run.object_bytes] * len(stored))
    for label, (place, answer, page) in zip(run.labels[numbers.start : numbers.stop], found, strict=True):
        yield mark(place, reason_of(answer)), () if page is None else page.named(label).buffers


def placed_messages(
    store: TieredStore, call: ServedCall, runs: Sequence[NamedRun], window: SharedSlice, batch_bytes: int
) -> Iterator[bytes]:
    """Lay the pages that a call asks for into a window, and yield the messages that say so.

    Raises:
        InputError: the window is too small.
        Refused: the call was cut off, or its client has gone.
    """
    parts = SharedParts(window)
    for run in runs:
        count = len(run.labels)
        step = max(1, batch_bytes // run.object_bytes)
        start = 0
        while start < count:
            placed_count = _place(store, call.tenant, run, start, parts)
            start += placed_count
            if parts.untold_bytes >= PLACED_BYTES:
                yield parts.message()
            if placed_count:
                continue
            numbers = range(start, min(start + step, count))
            for answer, buffers in read_pages(store, call.tenant, run, numbers):
                parts.add(answer, buffers)
                if parts.untold_bytes >= SHARED_PART_BYTES:
                    yield parts.message()
            start = numbers.stop
            call.moved()
    if parts.is_untold:
        yield parts.message()


def _place(store: TieredStore, tenant: str, run: NamedRun, start: int, parts: SharedParts) -> int:
    """Read pages from ``start`` on into their places; return how many are there, the first that is not excluded."""
    page_bytes = run.object_bytes
    if run.claimed_bytes != page_bytes or not store.may_place:
        return 0
    end = start + min(max(1, PLACED_BYTES // page_bytes), len(run.labels) - start, parts.room_bytes // page_bytes)
    places = [parts.place(number * page_bytes, page_bytes) for number in range(end - start)]
    targets = targets_of(
        [
            _PlacedPage(label, None, (place[HEADER_BYTES:],))
            for label, place in zip(run.stored[start:end], places, strict=True)
        ]
    )
    placed_count = store.place(tenant, targets)
    for label, place, target in zip(run.labels[start:end], places, targets[:placed_count], strict=False):
        place[:HEADER_BYTES] = relabelled(target.buffers[0].tobytes(), label)
        parts.add_placed(mark(FoundTier.STORE, reason_of(Answer.HIT)), page_bytes)
    return placed_count
