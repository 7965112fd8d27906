"""Order of the batches of one publisher, without any I/O: what is applied, what is missing, what is asked for again.

    numbers    0 1 2 3 4 . . 7 8        5 and 6 are missing: nothing of the engine is counted, 7 and 8 wait,
                         ^ next_seq     and a replay is asked for

A replay is asked for from the batch on that was applied last: if the publisher has another one of that number now, or
none, it was started anew and counts from 0 again. Where a replay does not bring what is missing, because the publisher
keeps it no longer or does not answer, what the engine held before is forgotten, and an announcement of everything is
asked for; an engine that knows no such request stays known in part until it says ``AllBlocksCleared``.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum, auto

from unified_cache.errors import EventFormatError
from unified_cache.events.encoding import decode_batch
from unified_cache.events.index import Knowledge, PrefixIndex
from unified_cache.events.values import ClearedEvent

__all__ = ["FollowerCounts", "PublisherFollower", "ReplayRequest"]

WAITING_BYTES_MAX = 64 << 20
"""Batches that wait for a replay, in bytes; those beyond are asked for again."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Request to a publisher."""

    start_seq: int | None
    """Number that the replay begins with; None asks for an announcement of everything."""


class Asking(Enum):
    """Request that a publisher has not answered yet."""

    NOTHING = auto()
    REPLAY = auto()
    """Batches wait until it has brought what is before them."""
    ANNOUNCEMENT = auto()


@dataclass(slots=True)
class FollowerCounts:
    """Batches of one publisher so far, and what was wrong with them."""

    batches: int = 0
    """Applied."""
    gaps: int = 0
    """Times that a batch was missing."""
    losses: int = 0
    """Times that what was missing did not come."""
    restarts: int = 0
    """Times that the publisher was started anew."""
    not_understood: int = 0
    """Batches that could not be read."""
    passed_over: int = 0
    """Events about tiers that are none of ours."""


class PublisherFollower:
    """Batches of one publisher, in order, into an index. One thread uses it; times are in seconds of one clock."""

    def __init__(self, index: PrefixIndex, engine: str, replay_timeout_s: float | None) -> None:
        """Follow ``engine``, which the index has. None for a publisher that cannot be asked for a replay."""
        self._index = index
        self._engine = engine
        self._replay_timeout_s = replay_timeout_s
        self._next_seq = 0
        self._last_digest = b""
        """Of the batch applied last; empty if there is none."""
        self._last_sent_s = -float("inf")
        """Time of the batch applied last, by the publisher's clock."""
        self._waiting: dict[int, bytes] = {}
        self._waiting_bytes = 0
        self._asking = Asking.NOTHING
        self._deadline_s = float("inf")
        self._asked_seq = 0
        """``next_seq`` when the replay under way was asked for."""
        self._replayed_count = 0
        """Batches of that replay."""
        self._is_anew = False
        """True if the replay under way has shown that the publisher was started anew."""
        self._is_whole = True
        self._wants_announcement = False
        self._requests: list[ReplayRequest] = []
        self.counts = FollowerCounts()

    @property
    def next_seq(self) -> int:
        """Number of the batch that is to be applied next."""
        return self._next_seq

    @property
    def deadline_s(self) -> float:
        """Time at which an answer is late; infinite while none is due."""
        return self._deadline_s

    def take_requests(self) -> list[ReplayRequest]:
        """Return what the publisher is to be asked for now, each once."""
        taken, self._requests = self._requests, []
        return taken

    def begin(self, now_s: float) -> None:
        """Ask for all that the publisher keeps; without replay, wait for the first batch."""
        self._index.set_knowledge(self._engine, Knowledge.NONE)
        self._index.forget(self._engine)
        if self._replay_timeout_s is not None:
            self._ask_replay(now_s)

    def look(self, now_s: float) -> None:
        """Ask whether anything is missing that no later batch has shown, and whether the publisher was started anew."""
        if self._replay_timeout_s is not None and self._asking is Asking.NOTHING:
            if self._is_whole:
                self._ask_replay(now_s)
            else:
                self._ask_announcement(now_s)

    def receive(self, seq: int, payload: bytes, now_s: float) -> None:
        """Take a batch as it was published."""
        if self._asking is Asking.REPLAY:
            self._wait_with(seq, payload)
        elif seq == self._next_seq:
            self._apply(payload)
            self._tell_knowledge()
            if self._wants_announcement and self._asking is Asking.NOTHING:
                self._ask_announcement(now_s)
        elif seq < self._next_seq and not self._is_newer(payload):
            pass  # a replay has brought it already
        else:
            self._wait_with(seq, payload)
            if seq < self._next_seq:
                self._start_anew()
            self.counts.gaps += bool(self._last_digest) or seq > 0
            self._index.set_knowledge(self._engine, Knowledge.NONE)
            if self._replay_timeout_s is None:
                self._catch_up()
            else:
                self._ask_replay(now_s)

    def receive_again(self, seq: int, payload: bytes) -> None:
        """Take a batch of a replay."""
        if self._asking is not Asking.REPLAY or self._is_anew:
            return
        self._replayed_count += 1
        if seq == self._next_seq - 1:
            self._is_anew = _digest(payload) != self._last_digest
        elif seq >= self._next_seq:
            if seq > self._next_seq:
                self._lose(seq)
            self._apply(payload)

    def end_answer(self, now_s: float) -> None:
        """Take the end of what was asked for."""
        asked, self._asking, self._deadline_s = self._asking, Asking.NOTHING, float("inf")
        if asked is not Asking.REPLAY:
            return
        if self._is_anew or (self._last_digest and not self._replayed_count):
            self._start_anew()
            self._ask_replay(now_s)
            return
        self._drain()
        if self._waiting and self._next_seq > self._asked_seq:
            self._ask_replay(now_s)
            return
        self._catch_up()
        if self._wants_announcement:
            self._ask_announcement(now_s)

    def tick(self, now_s: float) -> bool:
        """Give up an answer that does not end in time; tell whether one was, which may still come."""
        if now_s < self._deadline_s:
            return False
        asked, self._asking, self._deadline_s = self._asking, Asking.NOTHING, float("inf")
        if asked is Asking.REPLAY:
            self._catch_up()
        return True

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _ask_replay(self, now_s: float) -> None:
        assert self._replay_timeout_s is not None
        self._asking = Asking.REPLAY
        self._deadline_s = now_s + self._replay_timeout_s
        self._replayed_count = 0
        self._is_anew = False
        self._asked_seq = self._next_seq
        self._requests.append(ReplayRequest(max(self._next_seq - 1, 0)))

    def _ask_announcement(self, now_s: float) -> None:
        self._wants_announcement = False
        if self._replay_timeout_s is not None:
            self._asking = Asking.ANNOUNCEMENT
            self._deadline_s = now_s + self._replay_timeout_s
            self._requests.append(ReplayRequest(None))

    def _wait_with(self, seq: int, payload: bytes) -> None:
        if seq not in self._waiting and self._waiting_bytes + len(payload) <= WAITING_BYTES_MAX:
            self._waiting[seq] = payload
            self._waiting_bytes += len(payload)

    def _drain(self) -> None:
        """Apply what waits and follows, and drop what a replay has brought."""
        while self._next_seq in self._waiting:
            self._apply(self._waiting[self._next_seq])
        for seq in [each for each in self._waiting if each < self._next_seq]:
            self._waiting_bytes -= len(self._waiting.pop(seq))

    def _catch_up(self) -> None:
        """Go on with what is there: what is missing before it is lost."""
        self._drain()
        while self._waiting:
            self._lose(min(self._waiting))
            self._drain()
        self._tell_knowledge()

    def _lose(self, next_seq: int) -> None:
        """Give the batches before ``next_seq`` up, and with them what the engine held by then."""
        self.counts.losses += 1
        self._next_seq = next_seq
        self._is_whole = False
        self._wants_announcement = True
        self._index.forget(self._engine)

    def _start_anew(self) -> None:
        """Follow a publisher that has begun to count from 0 again: what it held before is gone."""
        self.counts.restarts += 1
        self._next_seq = 0
        self._last_digest = b""
        self._last_sent_s = -float("inf")
        self._is_whole = True
        self._wants_announcement = False
        self._index.set_knowledge(self._engine, Knowledge.NONE)
        self._index.forget(self._engine)

    def _apply(self, payload: bytes) -> None:
        """Put the next batch into the index."""
        self._next_seq += 1
        self._last_digest = _digest(payload)
        try:
            batch = decode_batch(payload)
        except EventFormatError:
            self.counts.not_understood += 1
            self._lose(self._next_seq)
            return
        self._last_sent_s = batch.seconds
        self.counts.batches += 1
        self.counts.passed_over += batch.passed_over
        self._index.apply(self._engine, batch.events)
        if any(isinstance(event, ClearedEvent) for event in batch.events):
            self._is_whole = True
            self._wants_announcement = False

    def _tell_knowledge(self) -> None:
        self._index.set_knowledge(self._engine, Knowledge.WHOLE if self._is_whole else Knowledge.PART)

    def _is_newer(self, payload: bytes) -> bool:
        """Tell whether a batch was published after the one applied last."""
        try:
            return decode_batch(payload).seconds > self._last_sent_s
        except EventFormatError:
            return True


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()
