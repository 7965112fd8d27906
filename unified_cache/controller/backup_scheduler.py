"""Scheduling of backups: the write policy in force, and the queues of prompts that wait for a backup.

                inserted, used again
                        |
    put off (BACK) -> due -> a backup -> all arrived
                        ^        |
                        |        v
                 for room, for the store      (retry queues)

A prompt that a policy means to back up stays in one of these until all of its pages have arrived, or cannot any more. A
backup that the host had no room for is tried again when another operation has given its pages back; one that the store
failed or declined, when another backup has been stored, and after a pause; either, when a request uses its prompt.
Each queue is bounded, and whatever falls out of it is counted by reason.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from unified_cache.controller import (
    Controller,
    LeftOut,
    NotStarted,
    Operation,
    OperationState,
    PageTally,
    StorageTier,
    TransferKind,
)
from unified_cache.controller.backup import BackupRequest, Backups
from unified_cache.controller.ranks.group import RankGroup
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.errors import ClosedError, ConfigError
from unified_cache.core.page import PageKey, Prompt

QUEUED_PROMPTS_MAX = 4096
"""Prompts that one queue holds at most, however short they are; of more, the oldest fall out."""

ATTEMPTS_MAX = 32
"""Backups in a row that bring a prompt no further, at most; then it is given up."""

RETRY_PAUSE_S = 1.0
"""Before a prompt that the store failed is tried again though no other backup was stored; doubled each time."""

RETRY_PAUSE_S_MAX = 60.0

RETRIED = frozenset((LeftOut.HOST_FULL, LeftOut.UNDER_WAY, LeftOut.DECLINED, LeftOut.FAILED, LeftOut.STOPPED))
"""Reasons that may be gone the next time."""

GIVEN_UP = frozenset((LeftOut.EVICTED, LeftOut.STORE_TOO_SMALL))
"""Reasons for which a backup gives pages up by itself."""


@dataclass(slots=True)
class BackupCounts:
    """Pages that the write policy meant to back up: ``asked == arrived + already + waiting + sum of lost_pages``."""

    asked_pages: int = 0
    """Of all components, once for each time that the policy asked for a backup of a prompt, unless it still waited."""
    arrived_pages: int = 0
    """Taken by storage, or by the host where there is no storage."""
    already_pages: int = 0
    """Known to be there before."""
    waiting_prompts: int = 0
    """Prompts that are put off, due, being backed up or to be tried again; ``waiting_pages`` of them."""
    waiting_pages: int = 0
    retries: int = 0
    """Backups that were tried again."""
    lost_prompts: int = 0
    """Prompts of which pages were given up."""
    lost_pages: dict[LeftOut, int] = field(default_factory=dict)
    """Pages given up, by the reason for which they were left out last."""

    def add(self, tally: PageTally) -> bool:
        """Count what a backup did with its pages for good; return whether it brought any of them further."""
        self.arrived_pages += tally.arrived
        self.already_pages += tally.already
        for reason in GIVEN_UP & tally.left_out.keys():
            self.lose(reason, tally.left_out[reason])
        return bool(tally.arrived or tally.already or GIVEN_UP & tally.left_out.keys())

    def lose(self, reason: LeftOut, pages: int) -> None:
        """Count pages that are given up."""
        if pages:
            self.lost_pages[reason] = self.lost_pages.get(reason, 0) + pages

    @property
    def lost_pages_count(self) -> int:
        """Pages given up, for whatever reason."""
        return sum(self.lost_pages.values())

    def __str__(self) -> str:
        """Return in one line what was given up."""
        lost = sorted(self.lost_pages.items(), key=lambda each: -each[1])
        reasons = ", ".join(f"{pages} {reason.value}" for reason, pages in lost)
        return f"{self.lost_pages_count} pages of {self.lost_prompts} prompts were not backed up: {reasons}"


class BackupQueue:
    """Prompts that wait for a backup, the one first that has waited longest."""

    def __init__(self, pages_max: int, counts: BackupCounts, *, prompts_min: int = 0) -> None:
        """Hold ``pages_max`` pages at most; with more the oldest fall out, but for the last ``prompts_min``."""
        self._counts = counts
        self._pages_max = pages_max
        self._prompts_min = prompts_min
        self._pages = 0
        self._requests: OrderedDict[PageKey, tuple[BackupRequest, int]] = OrderedDict()
        """With the pages that each counts as."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[BackupRequest]:
        """All of them."""
        return [request for request, _ in self._requests.values()]

    def add(self, request: BackupRequest, pages: int) -> list[BackupRequest]:
        """Queue a prompt, as ``pages`` more, behind the others; return those that fall out, the oldest."""
        key = request.prompt.keys[-1]
        if key in self._requests:
            earlier, waiting_pages = self._requests.pop(key)
            self._counts.asked_pages -= request.merge(earlier)
            self._pages -= waiting_pages
            pages = min(pages + waiting_pages, request.prompt.pages_count)
        self._requests[key] = request, pages
        self._pages += pages
        out: list[BackupRequest] = []
        while len(self) > self._prompts_min and (self._pages > self._pages_max or len(self) > QUEUED_PROMPTS_MAX):
            out += self.take(1)
        return out

    def take(self, prompts_max: int) -> list[BackupRequest]:
        """Return and forget so many of those that have waited longest."""
        return [self._remove(next(iter(self._requests))) for _ in range(min(prompts_max, len(self)))]

    def take_used(self, prompt: Prompt) -> list[BackupRequest]:
        """Return and forget those that a prompt begins with."""
        return [self._remove(key) for key in prompt.keys if key in self._requests] if self._requests else []

    def _remove(self, key: PageKey) -> BackupRequest:
        request, pages = self._requests.pop(key)
        self._pages -= pages
        return request


class BackupScheduler:
    """The write policy in force, and bounded queues of the prompts that wait for a backup."""

    def __init__(
        self,
        config: CacheConfig,
        backups: Backups,
        controller: Controller,
        ranks: RankGroup,
        clock: Callable[[], float],
    ) -> None:
        """Follow ``config.write``; a ConfigError if it writes, and there is no host tier. ``clock`` gives seconds."""
        self._backups = backups
        self._controller = controller
        self._ranks = ranks
        self._clock = clock
        self._counts = BackupCounts()
        self._due: deque[BackupRequest] = deque()
        self._running: dict[Operation, BackupRequest] = {}
        pages_max = config.device_pages[0] + config.host_pages[0]
        self._for_room = BackupQueue(pages_max, self._counts, prompts_min=1)
        """Those that the host had no room for, or that another backup is storing."""
        self._for_store = BackupQueue(pages_max, self._counts, prompts_min=1)
        """Those that the store failed or declined, or was detached from."""
        self._retry_at_s = math.inf
        """When the first of either queue is tried again, whatever happens."""
        self._pause_s = RETRY_PAUSE_S
        self._released_count = 0
        self._policy = _policy_of(config)
        self._dirty = BackupQueue(int(config.device_pages[0] * config.dirty_share), self._counts)
        """Those that write-back has put off."""

    @property
    def writes_inserted(self) -> bool:
        """Whether every prompt is to be backed up; pages that the device evicts are then copied to the host first."""
        return self._policy in (WritePolicy.THROUGH, WritePolicy.BACK)

    def reused(self, prompt: Prompt) -> None:
        """Record that a request uses a prompt which another one left on the device."""
        if self._policy is WritePolicy.SELECTIVE:
            self._ask(prompt)
        for queue in (self._for_room, self._for_store):
            self._make_due(queue.take_used(prompt))

    def inserted(self, prompt: Prompt, new_pages: int) -> None:
        """Record that a prompt is on the device, its last ``new_pages`` pages for the first time."""
        if self.writes_inserted:
            self._ask(prompt, new_pages)

    def give_up_waiting(self) -> None:
        """Make all due that the policy has put off, and what is to be tried again."""
        self._make_due(self._dirty.take(len(self._dirty)))
        for queue in (self._for_room, self._for_store):
            self._make_due(queue.take(len(queue)))

    def start_due(self, storage: StorageTier | None) -> bool:
        """Start the backups that are due, as far as not too much is under way; return whether that was anything."""
        if self._running:
            self._look_at_ends()
        released_count = self._controller.released_count
        if released_count != self._released_count:
            if self._for_room:
                self._make_due(self._for_room.take(released_count - self._released_count))
            self._released_count = released_count
        if not self._due:
            return False
        started_count = min(self._controller.room, len(self._due))
        for _ in range(started_count):
            request, tally = self._due.popleft(), PageTally()
            steps = self._backups.write(request, storage, tally)
            self.started(request, self._controller.start(TransferKind.BACKUP, steps, tally=tally))
        return bool(started_count)

    def wait_all(self, timeout_s: float, storage: StorageTier | None, until: Operation | None = None) -> None:
        """Wait until no transfer runs and no backup is due, or ``until`` is over; raise as ``Controller.wait_all``."""
        deadline_s = time.monotonic() + timeout_s
        self._controller.wait_all(timeout_s, until)
        while self.start_due(storage) and until is None:
            self._controller.wait_all(deadline_s - time.monotonic())

    def look_at_clock(self) -> None:
        """Make the oldest prompt due that waits to be tried again, where it has waited long enough on every rank."""
        queue = self._for_store or self._for_room
        if queue and not self._ranks.is_lost:
            is_due = np.array([self._clock() >= self._retry_at_s], np.bool_)
            if self._ranks.agree(is_due)[0]:
                self._pause_s = min(2 * self._pause_s, RETRY_PAUSE_S_MAX)
                self._retry_at_s = self._clock() + self._pause_s
                self._make_due(queue.take(1))

    def storage_attached(self) -> None:
        """Make the oldest prompt due that waits for a store: another one is there."""
        self._make_due(self._for_store.take(1))

    def started(self, request: BackupRequest, operation: Operation | NotStarted) -> None:
        """Record the backup of a prompt that was due; it is not started where a rank is lost."""
        if operation:
            self._running[operation] = request
        else:
            self._lose(request, LeftOut.FAILED)

    def drop_all(self, reason: LeftOut) -> None:
        """Drop the backups that wait; pages that no backup tried are lost for ``reason``."""
        self._look_at_ends()
        self.give_up_waiting()
        while self._due:
            self._lose(self._due.popleft(), reason)

    def counts(self) -> BackupCounts:
        """Return the outcome of all pages that the policy meant to back up."""
        waiting = [*self._due, *self._running.values(), *self._dirty.requests]
        waiting += [*self._for_room.requests, *self._for_store.requests]
        counts = replace(
            self._counts,
            lost_pages=dict(self._counts.lost_pages),
            waiting_prompts=len(waiting),
            waiting_pages=sum(request.pages_count for request in waiting),
        )
        for operation in self._running:
            counts.add(operation.tally)
        return counts

    def _request_of(self, prompt: Prompt) -> BackupRequest:
        return self._backups.request_of(prompt)

    def _ask(self, prompt: Prompt, new_pages: int = 0) -> None:
        request = self._request_of(prompt)
        self._counts.asked_pages += request.pages_count
        is_put_off = self._policy is WritePolicy.BACK
        self._make_due(self._dirty.add(request, new_pages) if is_put_off else [request])

    def _make_due(self, requests: Iterable[BackupRequest]) -> None:
        self._due += requests
        while len(self._due) > QUEUED_PROMPTS_MAX:
            self._lose(self._due.popleft(), LeftOut.QUEUE_FULL)

    def _look_at_ends(self) -> None:
        """Take the backups that are over: queue what is to be tried again, and try one more where one was stored."""
        for operation in [each for each in self._running if each.state is not OperationState.RUNNING]:
            request, tally = self._running.pop(operation), operation.tally
            if self._counts.add(tally):
                request.attempts_count = 0
            elif LeftOut.UNDER_WAY not in tally.left_out:
                request.attempts_count += 1
            if GIVEN_UP & tally.left_out.keys():
                self._count_lost(request)
            request.leave_untried(_reason_of(operation))
            if request.pages_count:
                self._try_again(request)
            elif tally.stored or GIVEN_UP & tally.left_out.keys():
                self._pause_s = RETRY_PAUSE_S
                self._make_due(self._for_store.take(1))

    def _try_again(self, request: BackupRequest) -> None:
        """Queue a prompt of which pages were left out for what they wait for, or give it up."""
        reasons = dict(request.left_out())
        if request.attempts_count >= ATTEMPTS_MAX or not RETRIED.intersection(reasons):
            self._lose(request, LeftOut.FAILED)
            return
        self._counts.retries += 1
        waits_for_others = LeftOut.HOST_FULL in reasons or LeftOut.UNDER_WAY in reasons
        queue = self._for_room if waits_for_others else self._for_store
        if not self._for_store and not self._for_room:
            self._retry_at_s = self._clock() + self._pause_s
        for oldest in queue.add(request, request.prompt.pages_count):
            self._lose(oldest, LeftOut.QUEUE_FULL)

    def _lose(self, request: BackupRequest, reason: LeftOut) -> None:
        """Drop a prompt for ``reason``, but for pages that one backup has left to another."""
        request.leave_untried(reason)
        self._count_lost(request)
        for why, pages in request.left_out():
            self._counts.lose(why, pages)

    def _count_lost(self, request: BackupRequest) -> None:
        self._counts.lost_prompts += not request.has_lost
        request.has_lost = True


def _reason_of(operation: Operation) -> LeftOut:
    """Return why the backup ended before it reached these pages."""
    if isinstance(operation.error, ClosedError):
        return LeftOut.CLOSED
    if operation.state is OperationState.CANCELLED:
        return LeftOut.CANCELLED
    return LeftOut.STOPPED if operation.error is None else LeftOut.FAILED


def _policy_of(config: CacheConfig) -> WritePolicy:
    if config.host_pages[0] or config.write is WritePolicy.ON_CALL:
        return config.write
    if config.write is WritePolicy.THROUGH:
        return WritePolicy.ON_CALL  # through a host tier that is not there: nothing to write to
    raise ConfigError(f"the write policy {config.write.value} needs host pages, found {config.host_pages}")
