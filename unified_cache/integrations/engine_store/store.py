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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, get_ident
from traceback import format_exception
from types import TracebackType

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import (
    CacheError,
    ConfigError,
    InputError,
    StorageTimeoutError,
    without_secrets,
)
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.core.process import HomeProcess
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.sizes import parse_bytes
from unified_cache.integrations.engine_store.buffers import BounceBuffer, BounceMemory
from unified_cache.integrations.engine_store.calls import (
    AT_ONCE_BYTES_MAX,
    THREADS_MAX,
    WRITES_MAX,
    BufferedPiece,
    CallCounts,
    CallTime,
    EngineCall,
    OnEnd,
    Part,
    Piece,
    Registrations,
    ask,
    cut_call,
    cut_labels,
    cut_pages,
)
from unified_cache.integrations.engine_store.interface import (
    CALL_PAGES,
    Clock,
    EnginePage,
    EngineStoreConfig,
    EngineStoreCounts,
    Unavailable,
)
from unified_cache.storage_backends.common.bounded_call import (
    AGAIN,
    LOOK_S,
    Again,
    BoundedCall,
    CallState,
    CallThreads,
    call_within,
    current_call,
    run_here,
)
from unified_cache.storage_backends.common.breaker import Backoff, StoreOpening
from unified_cache.storage_backends.protocol import Answer, Capability, Level, Store
from unified_cache.storage_backends.removals import RemovalFeed, Removals
from unified_cache.storage_backends.url import check_storage_url, open_storage
from unified_cache.storage_backends.wrappers import Method, StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage, capability_of

logger = logging.getLogger(__name__)

CLOSE_S_MIN = 0.2
"""Given to the store itself to close, also where calls have taken all the time."""

CLOSE_LOOKS = 20
"""Looks, ``LOOK_S`` apart, until what was given up has ended the copy that it was at."""


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store, verified and guarded, and what it says of itself.

    Innermost first: the store, verification, deadline, retries, breaker. So a page is
    verified on the thread that read it, in the same call, while it is in that processor's caches.
    """

    verified: VerifiedStorage
    guard: StorageGuard
    capability: Capability
    memory: Store | None
    """The store itself, where it reads pages from memory: that waits for nothing, so it needs no guard."""

    @classmethod
    def around(cls, backend: Store, name: str, config: GuardConfig, clock: Clock) -> "OpenedStore":
        """Take a store over; asks it what it can do, without a bound on the time. The log calls it ``name``, if any."""
        capability = capability_of(backend)
        verified = VerifiedStorage(backend)
        named = replace(capability, name=name or capability.name)
        return cls(verified, StorageGuard(verified, named, config, clock), capability, backend.memory_reader())


class EngineStore:
    """A store for pages in an engine's memory, opened by URL: verified, guarded, and never in the engine's way.

    ``exists``, ``get`` and ``put`` raise nothing: a page that cannot be had or stored is an answer, and
    ``counts`` knows the reason. Each returns by its deadline. A store that hangs is left with bounce buffers of
    ours, and from then on nothing reads or writes the engine's rows; one that returns by itself is called on its
    caller's thread and given the rows, see ``Capability.bounded``. A store that is away is opened later, by the calls
    that come meanwhile, and then given the registrations. Any thread may call, several at a time.

    ``start`` and ``start_asking`` wait for nothing, and tell the end of their call on another thread. Who starts calls
    looks now and then whether one is late, by ``give_up_late``::

        start ──> piece ─┐ urgent: look-ups, reads     ┌─> thread ──> store
        get   ──> piece ─┴ deferrable: writes, hints ──┴─> thread ──> store       THREADS_MAX, of them WRITES_MAX
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
        threads_max = min(THREADS_MAX, guard.calls_max)
        self._threads = CallThreads(
            "engine-store", threads_max, total_max=guard.calls_max, deferrable_max=WRITES_MAX, clock=clock
        )
        self._calls: set[EngineCall] = set()
        """Under way."""
        self._changed = Condition()
        """Notified when one of them has ended."""
        self._feed: RemovalFeed | None = None
        self._home = HomeProcess("this engine store")
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
        call = EngineCall(Method.EXISTS, (), (), self.remember(identity, layout), self._time(), None)
        if self._reach(call):
            call.cuts = cut_labels(call)
            self._begin(call, 1)
            self._wait(call)

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
        return self._asked(Method.EXISTS, labels, due_s)

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

    def get(self, pages: Sequence[EnginePage]) -> list[Answer]:
        """Fill the rows of each page; HIT where they hold exactly the page that its label names.

        Pages in memory are read on this thread, which costs no hand-over. Rows of a page with another answer may hold
        anything. A large call is made in ``PARTS_MAX`` parts at a time.
        """
        memory = self._memory({page.label.identity for page in pages})
        if memory is None:
            return self._moved(Method.GET, pages, Level.CACHED)
        answers = self._read_memory(memory, pages)
        waiting = [number for number, answer in enumerate(answers) if answer is not Answer.HIT]
        if waiting:
            rest = [pages[number] for number in waiting] if len(waiting) < len(pages) else pages
            found = self._moved(Method.GET, rest, Level.CACHED)
            for number, answer in zip(waiting, found, strict=True):
                answers[number] = answer
        return answers

    def put(self, pages: Sequence[EnginePage], level: Level = Level.CACHED) -> list[Answer]:
        """Store pages as their rows hold them now; STORED where the page is in the store, or was.

        A page that the store says it has is neither read nor made recent, but for a durable put, or a small one to a
        service; the look-up is not counted: nobody wanted it. A large call is made in ``PARTS_MAX`` parts at a time.
        """
        return self._moved(Method.PUT, pages, level)

    def clear(self, identity: bytes, due_s: float = math.inf) -> bool:
        """Make every page of one identity a miss; return whether the store says that it has. A late clear goes on.

        Returns at ``due_s`` at the latest.
        """
        return bool(self._asked(Method.CLEAR, [Label(identity, b"", "")], due_s)[0])

    def start(self, method: Method, pages: Sequence[EnginePage], on_end: OnEnd, level: Level = Level.CACHED) -> None:
        """Begin to GET or PUT pages as ``get`` and ``put`` do; their rows are the store's until ``on_end`` is called.

        The time in which it waits for a thread is not the store's, so no deadline counts it.
        """
        labels = [page.label for page in pages]
        identities = {label.identity for label in labels}
        call = EngineCall(method, labels, pages, identities, self._time_in_line(), on_end, level)
        if not pages:
            self._threads.submit(int, lambda _: self._end(call), is_urgent=call.is_urgent)
            return
        self._when_reached(call, lambda: self._begin(call, self._cut(call, is_here=False)))

    def start_asking(self, method: Method, labels: Sequence[Label], on_end: OnEnd, due_s: float | None = None) -> None:
        """Begin what ``exists`` does (EXISTS), or count pages as used now, the first most of all (TOUCH).

        It is over by ``due_s`` at the latest, if that is given. A touch that the store does not take is lost.
        """
        time = self._time_in_line() if due_s is None else self._time(due_s)
        call = EngineCall(method, labels, (), {label.identity for label in labels}, time, on_end)

        def begin() -> None:
            call.cuts = cut_labels(call)
            self._begin(call, 1)

        self._when_reached(call, begin)

    def run(self, work: Callable[[], object], on_end: Callable[[], None]) -> None:
        """Do work that asks ``exists`` on a thread of the store's, and call ``on_end`` when it is over, or given up."""
        call = EngineCall(Method.EXISTS, (), (), (), self._time_in_line(), lambda _: on_end())
        call.cuts = cut_labels(call)
        (part,) = call.begin(1)
        with self._changed:
            self._calls.add(call)
        part.bounded = self._threads.submit(work, partial(self._settled, call, part))

    def give_up_late(self) -> None:
        """Give up what the store is late with, of calls that nobody waits for. Costs little where nothing is."""
        for call in self._calls.copy():
            self._give_up_late(call)

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until ``is_done``, which ends of calls change; return whether it is."""
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            with self._changed:
                if self._changed.wait_for(is_done, max(min(left_s, LOOK_S), 0.0)):
                    return True
            if left_s <= 0.0:
                return False
            self.give_up_late()

    def drop_waiting(self) -> None:
        """End what waits for a thread, and each call under way after the piece that it is at."""
        for call in self._calls.copy():
            call.stop(Unavailable.CALL_OVER)
        self._threads.withdraw_waiting()

    def take_removals(self) -> Removals | None:
        """Return what the store has removed since the last call; None if it reports no removals, or is not there.

        Reports begin at the first call that finds the store; earlier removals are not reported. Waits for no disk.
        """
        with self._changed:
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
            registered_count=len(self._registrations.taken),
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
        write go when it has returned. In a forked child nothing is done.
        """
        if not self._home.is_here:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
        bound_s = self._config.guard.deadline_s if timeout_s is None else timeout_s
        until_s = self._clock() + bound_s
        self.wait_until(lambda: not self._calls, bound_s)
        for _ in range(CLOSE_LOOKS):
            for call in self._calls.copy():
                self._leave(call)
            if self.wait_until(lambda: not self._calls, LOOK_S):
                break
        self._threads.close(0)
        with self._changed:
            if self._feed is not None:
                self._feed.close()
        opened = self._opening.close()
        if opened is not None:
            left_s = max(until_s - self._clock(), CLOSE_S_MIN)
            try:
                call_within(left_s, Method.CLOSE.value, opened.guard.close, self._clock)
            except Exception as error:  # noqa: BLE001  # the edge: a store's code
                logger.warning("a store was left before it was closed: %s: %s", type(error).__name__, error)
        self._bounce.close()

    def __enter__(self) -> "EngineStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _time(self, due_s: float = math.inf, pages_count: int = 0) -> CallTime:
        """Return the time of a call that begins now, and is waited for; none begins in a forked child."""
        self._home.check()
        now_s = self._clock()
        timeout_s = self._config.call_timeout_s * max(-(-pages_count // CALL_PAGES), 1)
        return CallTime(self._deadline_s, now_s, now_s + timeout_s, due_s, waits_in_line=False)

    def _time_in_line(self) -> CallTime:
        """Return the time of a call that begins when a thread is free, of which a forked child has none."""
        self._home.check()
        return CallTime(self._deadline_s, self._clock(), math.inf, math.inf, waits_in_line=True)

    @property
    def _deadline_s(self) -> float:
        opened = self._opening.store
        return self._config.guard.deadline_s if opened is None else opened.guard.deadline_s

    def _memory(self, identities: Collection[bytes]) -> Store | None:
        """Return the store's memory if it has one, is there, and has taken the identities."""
        opened = self._opening.store
        if opened is None or self._closed or not self._registrations.taken.issuperset(identities):
            return None
        return opened.memory

    def _read_memory(self, memory: Store, pages: Sequence[EnginePage]) -> list[Answer]:
        """Fill the rows of the pages that the store has in memory, on this thread; UNAVAILABLE are all others.

        They are verified in their rows. It waits for no disk, and for nobody who does.
        """
        time, copied_bytes = self._time(), 0
        answers: list[Answer] = []
        for cut in cut_pages(pages, AT_ONCE_BYTES_MAX):
            if self._closed or self._clock() >= time.until_s:
                break
            piece = BufferedPiece(cut, pages)
            try:
                answers += piece.read_memory(memory)
            except CacheError:  # closed by another thread
                break
            copied_bytes += piece.copied_bytes
        if copied_bytes:
            hits = [answer for answer in answers if answer is Answer.HIT]
            self._counts.add(Method.GET, hits, self._clock() - time.started_s, copied_bytes)
        return answers + [Answer.UNAVAILABLE] * (len(pages) - len(answers))

    def _asked(self, method: Method, labels: Sequence[Label], due_s: float) -> list[Answer]:
        """Ask the store about labels, and wait; no page moves."""
        if not labels:
            return []
        identities = () if method is Method.CLEAR else {label.identity for label in labels}
        call = EngineCall(method, labels, (), identities, self._time(due_s), None)
        opened = self._reach(call)
        if opened is not None:
            call.cuts = cut_labels(call)
            is_known = method is Method.EXISTS and not opened.capability.exists_costs_io
            is_spare = current_call() is not None  # somebody waits for this thread, and gives it up
            is_quick = call.is_zero_copy or (is_known and call.is_taken)
            self._begin(call, 1, is_here=is_spare or is_quick)
            self._wait(call)
        return self._answered(call)

    def _moved(self, method: Method, pages: Sequence[EnginePage], level: Level) -> list[Answer]:
        """Get or put pages, and wait."""
        if not pages:
            return []
        labels = [page.label for page in pages]
        time = self._time(pages_count=len(pages))
        call = EngineCall(method, labels, pages, {label.identity for label in labels}, time, None, level)
        if self._reach(call):
            parts_count = self._cut(call, is_here=True)
            self._begin(call, parts_count, is_here=call.is_zero_copy)
            self._wait(call)
        return self._answered(call)

    def _reach(self, call: EngineCall, timeout_s: float | None = None) -> OpenedStore | None:
        """Return the store if it is there, and has taken a call's identities or may be asked to; else stop the call."""
        if self._closed:
            call.stop(Unavailable.CLOSED)
            return None
        if timeout_s is None:
            timeout_s = max(0.0, call.time.first_due_s - self._clock())
        opened = self._opening.store or self._opening.reach(timeout_s)
        if opened is None or not self._registrations.may_ask(call.identities):
            call.stop(Unavailable.AWAY if opened is None else Unavailable.UNREGISTERED)
            return None
        call.is_taken = self._registrations.taken.issuperset(call.identities)
        call.is_zero_copy = call.is_taken and opened.capability.bounded
        return opened

    def _when_reached(self, call: EngineCall, begin: Callable[[], object]) -> None:
        """Call ``begin`` once the store is there; where it is not, look for it on a thread, and end the call."""
        opened = self._opening.store
        if opened is not None and not self._closed and self._registrations.may_ask(call.identities):
            self._reach(call, 0.0)
            begin()
            return

        def go_on(_: BoundedCall[object]) -> None:
            if self._reach(call, 0.0):
                begin()
            else:
                self._end(call)

        self._threads.submit(partial(self._opening.reach, self._deadline_s), go_on, is_urgent=call.is_urgent)

    def _cut(self, call: EngineCall, *, is_here: bool) -> int:
        """Cut a call into pieces; return how many of them may be asked at a time."""
        opened = self._opening.store
        assert opened is not None
        if call.method is Method.GET and not is_here:
            call.memory = self._memory(call.identities)
        has_memory = opened.memory is not None
        return cut_call(call, self._config, opened.capability, has_memory=has_memory, is_here=is_here)

    def _begin(self, call: EngineCall, parts_max: int, *, is_here: bool = False) -> None:
        """Begin the parts of a call, each on a thread, or ``is_here`` its only one on this; the last tells its end.

        Made here is what a store does that returns by itself.
        """
        if not is_here or call.has_rows:
            with self._changed:
                self._calls.add(call)
                if self._closed:
                    call.stop(Unavailable.CLOSED)
        parts = call.begin(parts_max)
        for part in parts:
            work, settled = partial(self._run, call, part, is_here=is_here), partial(self._settled, call, part)
            if is_here:
                settled(run_here(work))
            else:
                part.bounded = self._threads.submit(work, settled, is_urgent=call.is_urgent)
        if not parts:
            self._end(call)

    def _run(self, call: EngineCall, part: Part, *, is_here: bool = False) -> Again | None:
        """Make the pieces of a part; a write lets others go first after each."""
        buffer: BounceBuffer | None = None
        lets_go = not (call.is_urgent or is_here)
        while (piece := part.piece) is not None:
            if buffer is not None and not piece.take(buffer):
                self._bounce.release(buffer)
            outcome = self._make(call, piece)
            buffer = piece.revoke()
            has_more = call.end_piece(part, outcome)
            if buffer is not None and (lets_go or not has_more):
                self._bounce.release(buffer)
                buffer = None
            if lets_go and has_more and piece.copied_bytes:
                return AGAIN
        return None

    def _settled(self, call: EngineCall, part: Part, bounded: BoundedCall[object]) -> None:
        """Release what a part used that did not come to its end, and end the call with the last one."""
        error = bounded.take_error()  # in no frame that it holds itself, and with it the pages
        piece = call.end_part(part)
        if error is not None:
            call.stop(self._reason(call, error, bounded))
        buffer = None if piece is None else piece.revoke()
        if buffer is not None:
            # The call that has the buffer may be one that the store has made itself.
            user = error.call if isinstance(error, StorageTimeoutError) else bounded
            self._bounce.release(buffer, user)
        if call.leave_part(part):
            self._end(call)

    def _make(self, call: EngineCall, piece: Piece) -> list[Answer] | Unavailable:
        """Ask the store for a piece, in a call of this thread's; raises as the store does."""
        opened = self._opening.store
        assert opened is not None
        if not call.begin_step(piece, self._clock()):
            return Unavailable.REFUSED if Answer.UNAVAILABLE in call.answers else Unavailable.CALL_OVER
        if not call.is_taken:
            self._registrations.announce(opened.guard, call.identities, self._bounce.whole)
        read: list[Answer] = []
        if isinstance(piece, BufferedPiece):
            if call.memory is not None:
                read = piece.read_memory(call.memory)
                if all(read):
                    return read
            if piece.wanted_bytes:
                buffer = self._bounce.reserve(piece.wanted_bytes, piece.due_s - self._clock())
                if buffer is None:
                    return Unavailable.NO_BOUNCE_BUFFER
                if not piece.take(buffer):
                    self._bounce.release(buffer)
                    return Unavailable.CLOSED
        return ask(call, piece, opened.guard, read, self._clock)

    def _reason(self, call: EngineCall, error: BaseException, bounded: BoundedCall[object]) -> Unavailable:
        """Return why a part did not come to its end."""
        if bounded.state is CallState.WITHDRAWN:
            return Unavailable.CLOSED if self._closed else Unavailable.BUSY
        if isinstance(error, KeyboardInterrupt) and bounded.thread_id == get_ident():
            call.interrupt = KeyboardInterrupt()  # of the caller, on whose own thread it was
            return Unavailable.FAILED
        if isinstance(error, StorageTimeoutError):
            if self._closed and error.call is bounded:
                return Unavailable.CLOSED
            if call.labels or call.identities:  # work of ``run`` has calls of its own, which are counted
                self._counts.add_late()
            return Unavailable.LATE
        self._counts.last_error = str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, CacheError):
            # Not the error itself: a handler that keeps log records would keep its frames, and with them the pages.
            logger.error("a store raised what it should not: %s", "".join(format_exception(error)))
        return Unavailable.FAILED if self._registrations.taken.issuperset(call.identities) else Unavailable.UNREGISTERED

    def _end(self, call: EngineCall) -> None:
        """Release the rows of a call that is over, and tell who started it."""
        call.end()
        try:
            if call.on_end is not None:
                call.on_end(self._answered(call))
        finally:
            if call in self._calls:
                with self._changed:
                    self._calls.discard(call)
                    self._changed.notify_all()

    def _wait(self, call: EngineCall) -> None:
        """Wait until a call is over, and give up what the store is late with; interrupted, leave it first."""
        while True:
            try:
                if call.is_over_within(LOOK_S):
                    break
                self._give_up_late(call)
                if call.interrupt is not None:
                    self._leave(call)
            except BaseException as error:  # noqa: BLE001  # raised again once nobody has the rows
                call.interrupt = error
        if call.interrupt is not None:
            try:
                raise call.interrupt
            finally:
                call.interrupt = None  # its traceback holds this frame

    def _give_up_late(self, call: EngineCall) -> None:
        is_due = self._clock() >= call.due_s
        for bounded in call.bounded_calls():
            if not call.is_zero_copy:
                self._threads.give_up_if_late(bounded)
            if is_due:
                self._threads.withdraw(bounded)

    def _leave(self, call: EngineCall) -> None:
        """Begin nothing more of a call, and give up what is under way, but for what has the rows themselves."""
        call.stop(Unavailable.CLOSED)
        for bounded in call.bounded_calls():
            if call.is_zero_copy:
                self._threads.withdraw(bounded)
            else:
                self._threads.leave(bounded)

    def _answered(self, call: EngineCall) -> list[Answer]:
        """Return the answers of a call that is over, and count them."""
        opened = self._opening.store
        if call.method is Method.PUT and Answer.DECLINED in call.answers and opened is not None:
            self._counts.last_error = opened.guard.decline_reason or "the store has no room for a page under its cap"
        return self._counts.add_call(call, self._clock())
