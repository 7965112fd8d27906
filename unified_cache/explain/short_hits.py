"""Latest short hits of a cache, explained while somebody looks: by the owner, in its own calls, and told to any thread.

A hit is short where a page is missing that was, or may have been, computed here. It is explained when its request
locks what it has found, before anything is computed: then what is missing is still missing. Memory alone is looked at;
a store is not asked, since an owner would have to wait for it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from unified_cache.explain.explanation import Explanation, Loss
from unified_cache.explain.reasons import Why
from unified_cache.page import Prompt
from unified_cache.recording.note import FoundByTier
from unified_cache.recording.requests import FirstLookups
from unified_cache.tree import Lock

__all__ = ["SHORT_HITS_MAX", "ShortHit", "ShortHits"]

SHORT_HITS_MAX = 8
"""Short hits kept: as many as a page or a terminal has room for."""

EXPLAINED_EVERY_S = 1.0
"""Time between two that are kept: as often as somebody can read them."""

EXPLAINING_SHARE = 0.002
"""Processor time that explaining may take of the owner's time; a cache that remembers much sorts that now and then."""

SAVED_S = 60.0
"""Owner's time whose share may be taken at once, if it was not before: who opens a page sees short hits soon."""

LOOKED_AT_S = 5.0
"""Time after a look in which hits are explained."""

PASSED_MAX = 1_024
"""Prompts looked up while none was to be explained, and not locked yet; of more, all are let go."""


@dataclass(frozen=True, slots=True)
class ShortHit:
    """One request that found less than it asked for, and why."""

    at_s: float
    """Time of the explanation, in seconds since the epoch."""
    pages: int
    """Pages of the prompt that could have been found."""
    page_size: int
    found: FoundByTier
    bound_by: tuple[str, ...]
    """Components, or pools of a service, that lack a page for one page more."""
    reason: str
    """Why the first pages that are missing are, in one line."""
    picture: str
    """Lines of text that draw what each tier holds; empty where nobody knows more than the reason."""

    @property
    def missed(self) -> int:
        """Pages that were not found."""
        return self.pages - self.found.device - self.found.host - self.found.storage

    def as_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return {
            "at_s": round(self.at_s, 3),
            "pages": self.pages,
            "page_size": self.page_size,
            "device": self.found.device,
            "host": self.found.host,
            "storage": self.found.storage,
            "missed": self.missed,
            "bound_by": list(self.bound_by),
            "reason": self.reason,
            "picture": self.picture,
        }


class ShortHits:
    """A ``RequestWatcher`` that explains short hits. For the owner's thread, but for ``look`` and ``latest``.

    It is told of requests while somebody looks (``are_wanted``), and explains no more of them than a small part of the
    owner's time allows.
    """

    __slots__ = (
        "_clock",
        "_due_s",
        "_effort",
        "_explain",
        "_is_looked_at",
        "_lookups",
        "_passed",
        "_spent_until_s",
        "_wanted_until_s",
        "latest",
    )

    def __init__(
        self,
        explain: Callable[[Prompt], Explanation],
        clock: Callable[[], float] = time.monotonic,
        effort: Callable[[], float] = time.thread_time,
    ) -> None:
        """Take what explains a prompt from memory alone, seconds, and the owner's seconds of the processor."""
        self._explain = explain
        self._clock = clock
        self._effort = effort
        self._lookups = FirstLookups()
        self._passed: set[int] = set()
        """``id`` of prompts that were looked up while none was to be explained."""
        self._is_looked_at = False
        self._wanted_until_s = clock()
        self._due_s = clock()
        self._spent_until_s = clock() - SAVED_S
        """Time up to which explaining has taken its share; behind the present, the rest is saved."""
        self.latest: tuple[ShortHit, ...] = ()
        """The latest, the newest first; replaced as a whole."""

    def look(self) -> None:
        """Have hits explained for the next seconds."""
        self._is_looked_at = True

    def are_wanted(self) -> bool:
        """Tell whether somebody has looked lately; what the owner asks whenever it publishes."""
        now_s = self._clock()
        if self._is_looked_at:
            self._is_looked_at = False
            self._wanted_until_s = now_s + LOOKED_AT_S
        is_wanted = now_s < self._wanted_until_s
        if not is_wanted:
            self._lookups.clear()
            self._passed.clear()
        return is_wanted

    def matched(self, prompt: Prompt, device_end: int, host_end: int) -> None:
        """Take a look-up; only the first of a prompt tells where its pages were, and only if it is time for another."""
        if self._clock() < self._due_s:
            if len(self._passed) >= PASSED_MAX:
                self._passed.clear()
            self._passed.add(id(prompt))
        elif id(prompt) not in self._passed:
            self._lookups.note(prompt, device_end, host_end)

    def locked(self, prompt: Prompt, lock: Lock, bound_by: tuple[int, ...]) -> None:
        """Explain a request that found less than all, if it is time, and was when it was looked up first."""
        self._passed.discard(id(prompt))
        first = self._lookups.take(prompt)
        if first is None or lock.end == prompt.reusable_pages or self._clock() < self._due_s:
            return
        began_s = self._effort()
        explanation = self._explain(prompt)
        is_short = any(loss.reason.why is not Why.NEVER_COMPUTED for loss in explanation.losses) or explanation.near
        if is_short:
            found = first.found(lock.end)
            self.latest = (_short_hit(prompt, found, explanation), *self.latest[: SHORT_HITS_MAX - 1])
        now_s = self._clock()
        self._spent_until_s = max(self._spent_until_s, now_s - SAVED_S) + (self._effort() - began_s) / EXPLAINING_SHARE
        self._due_s = max(self._spent_until_s, now_s + EXPLAINED_EVERY_S if is_short else now_s)

    def inserted(self, before: Lock, after: Lock) -> None:
        """Ignore what a request has computed."""

    def released(self, lock: Lock) -> None:
        """Ignore the end of a request."""


def _short_hit(prompt: Prompt, found: FoundByTier, explanation: Explanation) -> ShortHit:
    return ShortHit(
        time.time(),
        prompt.reusable_pages,
        prompt.page_size,
        found,
        explanation.tiers[-1].bound_by,
        _reason_of(explanation),
        str(explanation),
    )


def _reason_of(explanation: Explanation) -> str:
    """Say in one line why the first missing pages are missing, and what else there is to it."""
    said: list[str] = []
    if explanation.losses:
        said.append(_loss_text(explanation.losses[0]))
    if len(explanation.losses) > 1:
        rest = sum(loss.pages for loss in explanation.losses[1:])
        said.append(f"and {rest:,} more for other reasons")
    said += [near.text for near in explanation.near[:1]]
    said += [left.text for left in explanation.left_alone[:1]]
    return "; ".join(said)


def _loss_text(loss: Loss) -> str:
    return f"{loss.component} [{loss.start:,}, {loss.end:,}): {loss.reason.text}"
