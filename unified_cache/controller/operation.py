"""One transfer, from issue to release: its kind, the pages that it counts, and how it goes on.

An operation is a generator that runs on the owner's thread. It pins and allocates, yields a *job*, and goes on when
the job has been run by a worker; ``with`` blocks around the ``yield`` give everything back however it ends.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol, final

from unified_cache.core.errors import CacheError, ClosedError, InternalError
from unified_cache.core.pool import ModelLayout, PageCopies


class TransferKind(Enum):
    """The four ways between tiers, and the one out."""

    BACKUP = "backup"
    """Device to host; and on to storage where there is one."""
    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Host to storage."""
    PREFETCH = "prefetch"
    """Storage to host."""
    CLEAR = "clear"
    """Out of storage."""


class LeftOut(Enum):
    """Reason why a page that an operation was asked for is not where it should be."""

    HOST_FULL = "host_full"
    """Other operations pinned its pages; or, of a prefetch, neither it nor the device had room."""
    HOST_TOO_SMALL = "host_too_small"
    """The host does not hold the prompt even when it is empty, and there is no storage that it could go on to."""
    STORE_TOO_SMALL = "store_too_small"
    """It lies behind the pages of its prompt that fit under the store's cap."""
    DEVICE_FULL = "device_full"
    UNDER_WAY = "under_way"
    """Another transfer was copying or storing it."""
    DECLINED = "declined"
    """The store had no room."""
    FAILED = "failed"
    """The store or the copy failed, or did not return in time; or the store did not have what it had announced."""
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """Somebody had the operation make do with what had come: ``finish_early``, a deadline, ``detach``."""
    CLOSED = "closed"
    """The cache was closed before."""
    EVICTED = "evicted"
    """Memory held it no longer, or not all that a resume there needs."""
    QUEUE_FULL = "queue_full"
    """More prompts waited for a backup than the queue holds."""


@dataclass(slots=True)
class PageTally:
    """Pages that one operation was asked for. Once it is over ``asked == arrived + already + sum of left_out``.

    Of a backup these are pages of all components; of a load or a prefetch, pages of the prompt by which it can be
    resumed further.
    """

    asked: int = 0
    arrived: int = 0
    """Brought to where they should be: to memory; by a backup to storage, or to the host where there is no storage."""
    already: int = 0
    """Known to be there before."""
    left_out: dict[LeftOut, int] = field(default_factory=dict)
    copied: int = 0
    """Copied from the device to the host on the way."""
    stored: int = 0
    """Taken by storage, or found there by a put, at the level asked for, by its own word on every rank."""

    @property
    def left_out_count(self) -> int:
        """Pages left out, for whatever reason."""
        return sum(self.left_out.values())

    def gain(self, pages: int) -> None:
        """Set the pages that have arrived by now; what others brought beyond what was asked for counts as asked too."""
        self.arrived = pages
        self.asked = max(self.asked, pages)

    def leave_out(self, reason: LeftOut, pages: int) -> None:
        """Count pages left out."""
        if pages:
            self.left_out[reason] = self.left_out.get(reason, 0) + pages

    def add(self, other: "PageTally") -> None:
        """Count what another operation counted, too."""
        self.asked += other.asked
        self.arrived += other.arrived
        self.already += other.already
        self.copied += other.copied
        self.stored += other.stored
        for reason, pages in other.left_out.items():
            self.leave_out(reason, pages)

    def close(self, reason: LeftOut) -> None:
        """Count what has neither arrived nor been left out by now as left out for ``reason``."""
        rest = self.asked - self.arrived - self.already - sum(self.left_out.values())
        if rest > 0:
            self.leave_out(reason, rest)


@dataclass(slots=True)
class Traffic:
    """Pages and bytes moved in one direction since the cache was opened.

    To storage: pages that it was not known to have. Those put again only to stay recent are looked up there, not moved.
    """

    component_pages: list[int]
    """By component."""
    payload_bytes: int = 0

    @property
    def pages(self) -> int:
        """Pages of all components together."""
        return sum(self.component_pages)


class TrafficCounts:
    """Traffic of one cache in all directions."""

    __slots__ = ("_traffic", "page_bytes")

    def __init__(self, layout: ModelLayout) -> None:
        self.page_bytes = [component.page_bytes for component in layout.components]
        """Payload of a page in all pools, by component."""
        moving = (TransferKind.BACKUP, TransferKind.LOAD, TransferKind.STORE, TransferKind.PREFETCH)
        self._traffic = {kind: Traffic([0 for _ in layout.components]) for kind in moving}

    def add(self, kind: TransferKind, parts: Sequence[PageCopies]) -> int:
        """Count pages that were moved; return how many."""
        traffic, total = self._traffic[kind], 0
        for part in parts:
            pages = len(part.pages)
            total += pages
            traffic.payload_bytes += pages * self.page_bytes[part.component]
            traffic.component_pages[part.component] += pages
        return total

    def copy(self) -> dict[TransferKind, Traffic]:
        """Return them, the caller's own."""
        return {
            kind: Traffic(list(found.component_pages), found.payload_bytes) for kind, found in self._traffic.items()
        }


class Job(Protocol):
    """Bytes to move, on a worker's thread. Results are attributes, read after the ``yield``."""

    @property
    def uses_storage(self) -> bool:
        """Whether it calls the store: one that hangs must not hold up copies, which have threads of their own."""
        ...

    @property
    def is_urgent(self) -> bool:
        """Whether a request waits for it: it goes before jobs that no request waits for."""
        ...

    def run(self) -> bool:
        """Do it, or a part of it after which another job may go first; True once it is over.

        Raises CacheError if it could not be done, and is then over.
        """
        ...

    def stop(self) -> None:
        """End soon; from any thread, also before it runs. What was done by then stands in the results.

        A job whose half is worth nothing may go on to its end instead, if that is near.
        """
        ...


@dataclass(frozen=True, slots=True)
class WaitFor:
    """A step that waits for the outcome of another operation, which does what this one needs, or fails to.

    Only an operation that holds nothing that others wait for may wait, so that no two wait for each other.
    """

    operation: "Operation"


Steps = Generator[Job | WaitFor, "Operation", int]
"""An operation's life: yields what it waits for, is sent the operation that it is, returns the pages that arrived."""


class OperationState(Enum):
    """State of an operation."""

    RUNNING = "running"
    DONE = "done"
    """All that was asked for is where it should be."""
    PARTIAL = "partial"
    """It ended well and left some of it out: ``Operation.tally`` says how many pages, and why."""
    FAILED = "failed"
    CANCELLED = "cancelled"


class NotStarted(Enum):
    """Reason why a transfer was not started, in the place of its operation; nothing is pinned, and nothing will come.

    False, unlike an operation: ``if operation := cache.prefetch(prompt):``.
    """

    NO_STORAGE = "no storage"
    """The cache has no store: compute what memory lacks, or ``attach`` a store."""
    NO_HOST = "no host tier"
    """The cache has no host memory, so a load has nothing to bring: compute what the device lacks."""
    BELOW_THRESHOLD = "below threshold"
    """Memory lacks fewer tokens than ``config.prefetching.threshold_tokens``: load and compute at once."""
    TOO_MANY = "too many under way"
    """``config.operations_max`` transfers are under way: go on without this one, or call again after a ``poll``."""
    RANK_LOST = "rank lost"
    """Another rank of the group is lost: nothing is moved any more. Close the cache, and start the group again."""

    def __bool__(self) -> Literal[False]:
        return False


@final
class Operation:
    """Handle of one transfer. Only the controller and its own steps change it.

    What it held may be given back later than it ends: see ``is_released``.
    """

    __slots__ = (
        "_steps",
        "awaited",
        "error",
        "fail_at_s",
        "followers",
        "is_released",
        "is_stopping",
        "job",
        "keep",
        "kind",
        "pages_count",
        "respond_by_s",
        "started_s",
        "state",
        "tally",
    )

    def __init__(
        self,
        kind: TransferKind,
        steps: Steps,
        started_s: float,
        fail_at_s: float,
        respond_by_s: float = math.inf,
        tally: PageTally | None = None,
        keep: "Callable[[Operation], None] | None" = None,
    ) -> None:
        self.kind = kind
        self.state = OperationState.RUNNING
        self.pages_count = 0
        """Pages that reached where they should be, once it is done; of a clear, the objects removed.

        Zero is an answer, not a failure.
        """
        self.tally = PageTally() if tally is None else tally
        """Pages that it was asked for, and the outcome of each; complete once it is over."""
        self.error: CacheError | None = None
        """Why it failed or was cancelled, if it did."""
        self.is_released = False
        """Whether everything that it pinned and allocated has been given back."""
        self.fail_at_s = fail_at_s
        """When it fails if it still runs; by the controller's clock."""
        self.started_s = started_s
        """When it was started, by the controller's clock."""
        self.respond_by_s = respond_by_s
        """When it is stopped: its request goes on with what has arrived."""
        self.keep = keep
        """Keeps what its job has brought by now and counts it; None once done, or if a job counts as a whole."""
        self.job: Job | None = None
        """The job that it waits for; None once it has ended."""
        self.awaited: Operation | None = None
        """The operation that it waits for, instead of a job of its own."""
        self.followers: set[object] = set()
        """Who reads what it brings: until all have left it neither goes on nor gives anything back."""
        self._steps = steps
        self.is_stopping = False
        """Whether it was asked to make do with what has arrived."""

    @property
    def is_woken(self) -> bool:
        """Whether it waits for another operation and need not any longer."""
        return self.awaited is not None and (self.is_stopping or self.awaited.state is not OperationState.RUNNING)

    def advance(self, error: CacheError | None) -> None:
        """Go on after what it waited for, which ended with ``error`` or well, up to the next wait or the end.

        An outcome that has been reported stays what it was. Whatever its steps raise ends it.
        """
        begins = self.job is None and self.awaited is None
        self.job = self.awaited = None
        try:
            if error is not None:
                step = self._steps.throw(error)
            else:
                step = next(self._steps) if begins else self._steps.send(self)
        except StopIteration as stop:
            self.is_released = True
            if self.state is OperationState.RUNNING:
                self.pages_count = stop.value
            self.set_outcome(OperationState.DONE, None)
        except CacheError as failure:
            self.is_released = True
            self.set_outcome(OperationState.FAILED, failure)
        except BaseException as bug:
            self.is_released = True
            reason = InternalError(f"the {self.kind.value} raised {type(bug).__name__}: {bug}")
            reason.__cause__ = bug
            self.set_outcome(OperationState.FAILED, reason)
            if not isinstance(bug, Exception):
                raise
        else:
            if isinstance(step, WaitFor):
                self.awaited = step.operation
                return
            self.job = step
            if self.is_stopping:
                step.stop()

    def gain(self, pages_count: int) -> None:
        """Set the pages that have arrived by now, as long as its outcome is open."""
        if self.state is OperationState.RUNNING:
            self.pages_count = pages_count
            self.tally.gain(pages_count)

    def stop(self) -> None:
        """Make its job end at the next batch, and each later one before it begins; pages that arrived are kept."""
        self.is_stopping = True
        if self.job is not None:
            self.job.stop()

    def set_outcome(self, state: OperationState, error: CacheError | None) -> None:
        """Set the outcome once; DONE becomes PARTIAL if any page was left out."""
        if self.state is not OperationState.RUNNING:
            return
        if state is OperationState.DONE:
            reason = LeftOut.STOPPED
        elif state is OperationState.CANCELLED:
            reason = LeftOut.CANCELLED
        else:
            reason = LeftOut.CLOSED if isinstance(error, ClosedError) else LeftOut.FAILED
        self.tally.close(reason)
        self.state = OperationState.PARTIAL if state is OperationState.DONE and self.tally.left_out else state
        self.error = error

    def release(self) -> None:
        """Release its slots and locks. No job of it may be running, and no store may use its pages."""
        self.job = self.awaited = None
        try:
            self._steps.close()
        finally:
            self.is_released = True
