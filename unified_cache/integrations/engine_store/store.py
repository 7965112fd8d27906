"""The store of an engine's adapter: verified, bounded in time, and raising nothing while the engine runs.

    with EngineStore.open("packed:/var/cache/kv") as store:
        store.register(identity, layout)
        answers = store.get([EnginePage(label, (row_of_k, row_of_v))])

Every page has an answer, and ``counts`` says of each that was UNAVAILABLE why. A call returns by its deadline, whatever
the store does, and from then on nothing reads or writes the engine's rows::

    started_s      + deadline_s                   + call_timeout_s
    |              a call that hangs is left      no further part of the task is begun
    |              with its bounce buffer
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import Condition, Lock, get_ident
from traceback import format_exception
from types import TracebackType

from unified_cache.core.byte_sizes import parse_bytes
from unified_cache.core.errors import (
    CacheError,
    CallInFlight,
    ConfigError,
    InputError,
    StorageTimeoutError,
    without_secrets,
)
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.integrations.engine_store import tasks
from unified_cache.integrations.engine_store.away import OpenedStore, Registrations
from unified_cache.integrations.engine_store.buffers import BounceBuffer, BounceMemory
from unified_cache.integrations.engine_store.interface import (
    CALL_PAGES,
    CallCounts,
    Clock,
    EnginePage,
    EngineStoreConfig,
    EngineStoreCounts,
    Unavailable,
)
from unified_cache.integrations.engine_store.tasks import (
    AT_ONCE_BYTES_MAX,
    BufferedPath,
    CallTime,
    CopyPath,
    Part,
    Task,
    ZeroCopyPath,
    parts_of,
)
from unified_cache.storage_backends.common.bounded_call import BoundedCall, CallState, bound_steps
from unified_cache.storage_backends.common.breaker import Backoff
from unified_cache.storage_backends.common.call_threads import LOOK_S, CallThreads, call_within, run_here
from unified_cache.storage_backends.common.opening import StoreOpening
from unified_cache.storage_backends.protocol import PIECE_BYTES_MAX, Answer, Level, Store
from unified_cache.storage_backends.removals import RemovalFeed, Removals
from unified_cache.storage_backends.url import check_storage_url, open_storage
from unified_cache.storage_backends.wrappers import Method

logger = logging.getLogger(__name__)

CLOSE_S_MIN = 0.2
"""Given to the store itself to close, also where calls have taken all the time."""


class _Callers:
    """Callers that are in a call: ``with callers:``."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = Condition(Lock())

    def wait_for_none(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until no caller is in a call."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout_s)

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()


class EngineStore:
    """A store for pages in an engine's memory, opened by URL: verified, guarded, and never in the engine's way.

    ``exists``, ``get``, ``put`` and ``touch`` raise nothing: a page that cannot be had or stored is an answer, and
    ``counts`` knows the reason. Each returns by its deadline. A store that hangs is left with bounce buffers of
    ours, and from then on nothing reads or writes the engine's rows; one that returns by itself is called on its
    caller's thread and given the rows, see ``Capability.bounded``. A store that is away is opened later, by the calls
    that come meanwhile, and then given the registrations. Any thread may call, several at a time.
    """

    def __init__(
        self, opening: StoreOpening[OpenedStore], bounce: BounceMemory, config: EngineStoreConfig, clock: Clock
    ) -> None:
        """Take the parts; ``open`` and ``opened_by`` make them."""
        guard = config.guard
        self._opening = opening
        self._bounce = bounce
        self._config = config
        self._clock = clock
        self._registrations = Registrations(Backoff(guard.breaker_pause_s, guard.breaker_pause_s_max), clock)
        self._counts = CallCounts()
        self._threads = CallThreads("engine-store", guard.calls_max, total_max=guard.calls_max, clock=clock)
        self._callers = _Callers()
        self._feed: RemovalFeed | None = None
        self._subscribing = Lock()
        self._closing = Lock()
        self._closed = False

    @classmethod
    def open(
        cls, url: str, config: EngineStoreConfig | None = None, *, bytes_max: str | int | None = None
    ) -> "EngineStore":
        """Open the store that ``url`` names, see ``storage_backends.url``, with a cap, as ``10TiB``, if it needs one.

        Waits for the store one deadline at most. One that is away is opened by later calls.

        Raises:
            ConfigError: the URL names no store, a package that it needs is not installed, or ``bytes_max`` is no size.
        """
        check_storage_url(url)
        if bytes_max is not None:
            parse_bytes(
                "bytes_max", bytes_max
            )  # a text that is no size is refused now, and not when the store is there
        return cls.opened_by(lambda: open_storage(url, bytes_max=bytes_max), config, name=without_secrets(url))

    @classmethod
    def opened_by(
        cls,
        make: Callable[[], Store],
        config: EngineStoreConfig | None = None,
        *,
        name: str = "",
        clock: Clock = time.monotonic,
    ) -> "EngineStore":
        """Open the store that ``make`` returns; where it raises StorageError, it is called again after a pause.

        The log calls it ``name``, or by its kind where that is empty.

        Raises:
            ConfigError: ``make`` raised it.
        """
        config = EngineStoreConfig() if config is None else config
        pauses = Backoff(config.guard.breaker_pause_s, config.guard.breaker_pause_s_max)
        opening = StoreOpening(
            lambda: OpenedStore.around(make(), name, config.guard, clock),
            lambda opened: opened.guard.close(),
            pauses,
            clock,
        )
        store = cls(opening, BounceMemory.allocate(config.bounce_bytes, clock), config, clock)
        opening.reach(config.guard.deadline_s)
        if isinstance(opening.failure, InputError):
            store.close()
            raise opening.failure
        return store

    def register(self, identity: Identity, layout: ModelLayout) -> None:
        """Remember an identity whose pages will be asked for; announce it now, or when the store is there.

        Waits for the store one deadline at most. ``counts().is_registered`` says whether the store has taken it.

        Raises:
            LayoutError: the layout's pools cannot be those of the identity's shard.
            ConfigError: a page does not fit into the bounce buffers (``bounce_bytes``), or under the store's cap.
        """
        identities = self.remember(identity, layout)
        time = self._time()
        opened = self._reached(identities, time)
        if opened is not None:
            self._call(opened, identities, [Task(partial(tasks.look_up, opened.guard, ()))], time)

    def remember(self, identity: Identity, layout: ModelLayout) -> list[bytes]:
        """Remember an identity as ``register`` does, and announce it with the first call that asks for its pages.

        Returns the digests that its pools are stored under.

        Raises:
            LayoutError: as ``register``.
            ConfigError: as ``register``.
        """
        if self._opening.store is not None:
            self._opening.store.capability.check_cap(layout)
        for pool in layout.pools:
            page_bytes = HEADER_BYTES + pool.page_bytes
            if page_bytes > self._bounce.bytes_max:
                found = f"found {self._bounce.bytes_max}"
                raise ConfigError(f"bounce_bytes must hold a page of {pool.name}, {page_bytes} bytes, {found}")
        return self._registrations.remember(identity, layout)

    def due_s(self) -> float:
        """Return when calls that begin now are late: the ``due_s`` of calls that an engine waits for as one."""
        return self._time().first_due_s

    def exists(self, labels: Sequence[Label], due_s: float = math.inf) -> list[Answer]:
        """Return for each label whether a get would, as far as is known without reading, find it: HIT if so.

        Returns at ``due_s`` at the latest.
        """
        return self._ask(Method.EXISTS, labels, tasks.look_up, due_s)

    def exists_at_once(self, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label, on this thread, whether the store knows from memory that it is there: HIT if so.

        UNAVAILABLE are all others, and no count has them. It waits for no disk, and for nobody who does.
        """
        memory = self._memory({label.identity for label in labels})
        try:
            known = [False] * len(labels) if memory is None else memory.knows(labels)
        except CacheError:  # closed by another thread
            known = [False] * len(labels)
        return [Answer.HIT if is_known else Answer.UNAVAILABLE for is_known in known]

    def get(self, pages: Sequence[EnginePage], parts_max: int = 1) -> list[Answer]:
        """Fill the rows of each page; HIT where they hold exactly the page that its label names.

        Pages in memory are read on this thread, which costs no hand-over. Rows of a page with another answer may hold
        anything. A large call is made in ``parts_max`` parts at a time.
        """
        answers = self._get_from_memory(pages)
        waiting = [number for number, answer in enumerate(answers) if not answer]
        rest = [pages[number] for number in waiting] if len(waiting) < len(pages) else pages
        found = self._transfer(Method.GET, rest, Level.CACHED, parts_max)
        for number, answer in zip(waiting, found, strict=True):
            answers[number] = answer
        return answers

    def put(self, pages: Sequence[EnginePage], level: Level = Level.CACHED, parts_max: int = 1) -> list[Answer]:
        """Store pages as their rows hold them now; STORED where the page is in the store, or was.

        A page that the store says it has is neither read nor made recent, and the look-up is not counted: nobody
        wanted it. A large call is made in ``parts_max`` parts at a time.
        """
        return self._transfer(Method.PUT, pages, level, parts_max)

    def touch(self, labels: Sequence[Label]) -> None:
        """Count pages as used now, the first most of all; a touch that the store does not take is lost."""
        self._ask(Method.TOUCH, labels, tasks.touch, math.inf)

    def clear(self, identity: bytes, due_s: float = math.inf) -> bool:
        """Make every page of one identity a miss; return whether the store says that it has. A late clear goes on.

        Returns at ``due_s`` at the latest.
        """
        time = self._time(due_s)
        opened = self._reached((), time)
        if opened is None:
            return False
        task = Task(partial(tasks.clear, opened.guard, identity))
        return self._call(opened, (), [task], time) == [None] and bool(task.answers)

    def take_removals(self) -> Removals | None:
        """Return what the store has removed since the last call; None if it reports no removals, or is not there.

        Reports begin at the first call that finds the store; earlier removals are not reported. Waits for no disk.
        """
        with self._subscribing:
            opened = self._opening.store
            if self._feed is None and opened is not None and not self._closed:
                self._feed = opened.guard.removals()
            return None if self._feed is None else self._feed.take()

    def counts(self) -> EngineStoreCounts:
        """Return what was counted so far, and the state of the store."""
        opened = self._opening.store
        if not self._counts.last_error and self._opening.error:
            self._counts.last_error = self._opening.error
        counts = replace(
            self._counts.copy(),
            late_now_count=self._threads.lost_count,
            bounce_bytes=self._bounce.bytes_max,
            quarantined_bytes=self._bounce.quarantined_bytes(),
            registered_count=self._registrations.taken_count,
            announced_count=self._registrations.count,
        )
        if opened is None:
            return counts
        return replace(
            counts,
            flaws=opened.verified.flaws_count,
            breaker=opened.guard.breaker.state,
        )

    def wait_for_late_calls(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until the store has returned from every late call; return whether it has."""
        return self._threads.wait_for_lost(timeout_s)

    @property
    def is_up(self) -> bool:
        """Whether the store is there and not paused after failures, as far as is known."""
        opened = self._opening.store
        return opened is not None and not opened.guard.breaker.is_resting

    def close(self, timeout_s: float | None = None) -> None:
        """Answer UNAVAILABLE from now on, let calls under way end, and close the store; wait ``timeout_s`` at most.

        ``timeout_s`` is the deadline unless given. After it no view of an engine's memory is left, whatever the store
        does, but of callers that are still in a store that returns by itself. Bounce buffers that another may still
        write go when it has returned.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            bound_s = self._config.guard.deadline_s if timeout_s is None else timeout_s
            until_s = self._clock() + bound_s
            self._threads.close(0)
            self._callers.wait_for_none(bound_s)
            self._threads.leave_all()
            self._callers.wait_for_none(20 * LOOK_S)  # each goes when the copy under way has ended
            with self._subscribing:
                if self._feed is not None:
                    self._feed.close()
            opened = self._opening.close()
            if opened is not None:
                left_s = max(until_s - self._clock(), CLOSE_S_MIN)
                try:
                    call_within(left_s, Method.CLOSE.value, opened.guard.close, self._clock)
                except CacheError as error:
                    logger.warning("a store was left before it was closed: %s", error)
            self._bounce.close()

    def __enter__(self) -> "EngineStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _time(self, due_s: float = math.inf, pages_count: int = 0) -> CallTime:
        """Return the time of a call that begins now."""
        opened, now_s = self._opening.store, self._clock()
        deadline_s = self._config.guard.deadline_s if opened is None else opened.guard.deadline_s
        timeout_s = self._config.call_timeout_s * max(-(-pages_count // CALL_PAGES), 1)
        return CallTime(now_s, now_s + timeout_s, deadline_s, due_s)

    def _left_s(self, time: CallTime) -> float:
        """Return the seconds that a call may wait before its first step."""
        return max(0.0, time.first_due_s - self._clock())

    def _reached(self, identities: Collection[bytes], time: CallTime) -> OpenedStore | None:
        """Return the store if it is there, and has taken the identities or may be asked to; see ``_absence``."""
        if self._closed:
            return None
        opened = self._opening.store or self._opening.reach(self._left_s(time))
        return opened if opened is not None and self._registrations.may_ask(identities) else None

    def _absence(self) -> Unavailable:
        """Return why the store was not reached."""
        if self._closed:
            return Unavailable.CLOSED
        return Unavailable.AWAY if self._opening.store is None else Unavailable.UNREGISTERED

    def _memory(self, identities: Collection[bytes]) -> Store | None:
        """Return the store's memory if it has one, is there, and has taken the identities."""
        opened = self._opening.store
        if opened is None or self._closed or not self._registrations.are_taken(identities):
            return None
        return opened.memory

    def _ask(
        self,
        method: Method,
        labels: Sequence[Label],
        ask: Callable[[Store, Sequence[Label], list[Answer]], Iterator[bool]],
        due_s: float,
    ) -> list[Answer]:
        """Ask the store about labels; no page moves."""
        if not labels:
            return []
        time = self._time(due_s)
        identities = {label.identity for label in labels}
        opened = self._reached(identities, time)
        if opened is None:
            return self._answered(method, [], len(labels), self._absence(), time.started_s)
        task = Task(partial(ask, opened.guard, labels))
        is_known = method is Method.EXISTS and not opened.capability.exists_costs_io
        if (is_known or opened.capability.bounded) and self._registrations.are_taken(identities):
            (reason,) = self._call_here([task], time)
        else:
            (reason,) = self._call(opened, identities, [task], time)
        return self._answered(method, task.answers, len(labels), reason, time.started_s)

    def _get_from_memory(self, pages: Sequence[EnginePage]) -> list[Answer]:
        """Fill the rows of the pages that the store has in memory, on this thread; UNAVAILABLE are all others.

        They are verified in their rows. It waits for no disk, and for nobody who does.
        """
        time = self._time()
        memory = self._memory({page.label.identity for page in pages})
        if memory is None:
            return [Answer.UNAVAILABLE] * len(pages)
        task = Task(partial(tasks.read_memory, memory, pages))
        self._call_here([task], time)
        hits = [page for page, answer in zip(pages, task.answers, strict=False) if answer]
        if hits:
            self._counts.add_bytes(Method.GET, sum(map(tasks.payload_bytes, hits)))
            self._counts.add(Method.GET, [Answer.HIT] * len(hits), self._clock() - time.started_s)
        return task.answers + [Answer.UNAVAILABLE] * (len(pages) - len(task.answers))

    def _transfer(self, method: Method, pages: Sequence[EnginePage], level: Level, parts_max: int) -> list[Answer]:
        """Get or put pages."""
        time = self._time(pages_count=len(pages))
        if not pages:
            return []
        identities = {page.label.identity for page in pages}
        opened = self._reached(identities, time)
        if opened is None:
            return self._answered(method, [], len(pages), self._absence(), time.started_s)
        is_taken = self._registrations.are_taken(identities)
        is_zero_copy = opened.capability.bounded and is_taken
        # A bounded store cuts them itself, and has several calls under way.
        is_cut = self._config.piece_bytes is not None or not is_zero_copy
        piece_bytes = self._piece_bytes(opened, method, level) if is_cut else AT_ONCE_BYTES_MAX
        parts = parts_of(pages, piece_bytes, parts_max if is_taken else 1)
        if not is_zero_copy and sum(part.buffer_bytes for part in parts) > self._bounce.bytes_max:
            parts = parts_of(pages, piece_bytes, 1)
        paths: Sequence[CopyPath]
        if is_zero_copy:
            paths = [ZeroCopyPath(part.pages) for part in parts]
            moves = [self._move(method, level, opened, part, path) for part, path in zip(parts, paths, strict=True)]
            reasons = self._call_here(moves, time)
        else:
            buffers = self._bounce.reserve([part.buffer_bytes for part in parts], self._left_s(time))
            if not buffers:
                return self._answered(method, [], len(pages), Unavailable.NO_BOUNCE_BUFFER, time.started_s)
            paths = [BufferedPath(part.pages, buffer) for part, buffer in zip(parts, buffers, strict=True)]
            moves = [self._move(method, level, opened, part, path) for part, path in zip(parts, paths, strict=True)]
            reasons = self._call(opened, identities, moves, time, buffers)
        self._counts.add_bytes(method, sum(path.copied_bytes for path in paths))
        answers: list[Answer] = []
        for part, task, reason in zip(parts, moves, reasons, strict=True):
            answers += self._completed(method, task.answers, len(part.pages), reason)
        self._counts.add(method, answers, self._clock() - time.started_s)
        return answers

    @staticmethod
    def _move(method: Method, level: Level, opened: OpenedStore, part: Part, path: CopyPath) -> Task:
        if method is Method.GET:
            return Task(partial(tasks.get, opened.guard, part.pieces, path), path)
        labels = [page.label for page in part.pages]
        return Task(partial(tasks.put, opened.guard, level, labels, part.pieces, path), path)

    def _call(
        self,
        opened: OpenedStore,
        identities: Collection[bytes],
        parts: Sequence[Task],
        time: CallTime,
        buffers: Sequence[BounceBuffer] = (),
    ) -> list[Unavailable | None]:
        """Run the parts of a call on threads of ours and wait for them; return why each did not come to its end.

        The identities are registered first. Releases the buffers that the parts' pages lie in.
        """

        def register_and_run(task: Task) -> None:
            bound_steps(time.first_due_s)
            if self._left_s(time):
                self._registrations.announce(opened.guard, identities, self._bounce.whole)
                task.run(time, self._clock)

        reasons: list[Unavailable | None] = []
        with self._callers:
            calls = [self._threads.submit(partial(register_and_run, task)) for task in parts]
            users: list[CallInFlight] = [*calls]
            try:
                for number, call in enumerate(calls):
                    self._threads.wait(call, self._left_s(time))
                    reason, users[number] = self._outcome(call)
                    reasons.append(reason)
            finally:
                for call, task in zip(calls, parts, strict=True):
                    self._threads.leave(call)
                    task.revoke()
                for buffer, user in zip(buffers, users, strict=False):
                    self._bounce.release(buffer, user)
        if not self._registrations.are_taken(identities):
            return [Unavailable.UNREGISTERED if reason is Unavailable.FAILED else reason for reason in reasons]
        return reasons

    def _call_here(self, parts: Sequence[Task], time: CallTime) -> list[Unavailable | None]:
        """Run the parts of a call by a store that returns by itself, the first on the caller's thread; no buffer."""
        with self._callers:
            if self._closed:
                return [Unavailable.CLOSED] * len(parts)
            others = [self._threads.submit(partial(task.run, time, self._clock)) for task in parts[1:]]
            calls = [run_here(lambda: parts[0].run(time, self._clock)), *others]
            _settle(others)
            return [self._outcome(call)[0] for call in calls]

    def _outcome(self, call: BoundedCall[None]) -> tuple[Unavailable | None, CallInFlight]:
        """Return why a settled call did not come to its end, None if it did, and the call that may use its pages.

        Raises:
            KeyboardInterrupt: of the caller, on whose own thread it was.
        """
        error = call.take_error()  # in no frame that it holds itself, and with it the pages
        if error is None:
            return None, call
        if call.state is CallState.WITHDRAWN:
            return Unavailable.CLOSED if self._closed else Unavailable.BUSY, call
        if isinstance(error, StorageTimeoutError):
            if self._closed and error.call is call:
                return Unavailable.CLOSED, call
            self._counts.add_late()
            return Unavailable.LATE, error.call
        if isinstance(error, KeyboardInterrupt) and call.thread_id == get_ident():
            raise KeyboardInterrupt
        self._counts.last_error = str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, CacheError):
            # Not the error itself: a handler that keeps log records would keep its frames, and with them the pages.
            logger.error("a store raised what it should not: %s", "".join(format_exception(error)))
        return Unavailable.FAILED, call

    def _piece_bytes(self, opened: OpenedStore, method: Method, level: Level) -> int:
        # A page that is put is sealed before the next is copied; one that was not in memory is waited for anyway.
        is_in_caches = method is Method.GET and opened.memory is None
        call_bytes = opened.capability.call_bytes if is_in_caches else PIECE_BYTES_MAX
        return self._config.piece_bytes_for(call_bytes, is_durable=level is Level.DURABLE)

    def _answered(
        self, method: Method, answers: list[Answer], count: int, reason: Unavailable | None, started_s: float
    ) -> list[Answer]:
        """Complete the answers of a call with UNAVAILABLE, and count them."""
        completed = self._completed(method, answers, count, reason)
        self._counts.add(method, completed, self._clock() - started_s)
        return completed

    def _completed(self, method: Method, answers: list[Answer], count: int, reason: Unavailable | None) -> list[Answer]:
        """Complete the answers of a part of a call with UNAVAILABLE, and count why."""
        completed = answers[:count]  # a copy: a task that was given up may still answer
        refused_count = completed.count(Answer.UNAVAILABLE)
        if Answer.DECLINED in completed and (opened := self._opening.store) is not None:
            self._counts.last_error = opened.guard.decline_reason or "the store has no room for a page under its cap"
        self._counts.add_reason(method, Unavailable.REFUSED, refused_count)
        if reason is None:
            reason = Unavailable.REFUSED if refused_count else Unavailable.CALL_OVER
        self._counts.add_reason(method, reason, count - len(completed))
        return completed + [Answer.UNAVAILABLE] * (count - len(completed))


def _settle(parts: Sequence[BoundedCall[None]]) -> None:
    """Wait until no part has rows any more, in a store that returns by itself.

    Raises:
        KeyboardInterrupt: the wait was interrupted.
    """
    is_interrupted = False
    for part in parts:
        while not part.returned:
            try:
                part.wait(LOOK_S)
            except KeyboardInterrupt:
                is_interrupted = True
    if is_interrupted:
        raise KeyboardInterrupt
