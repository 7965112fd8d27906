"""Hints of an engine about sessions: which come back in a while.

A session is a name that an engine gives its prompts (``Prompt.session``). Of each is known the node where the prompt
ends that was given back last. Of one that comes back, since it waits for a tool, the prompt is preferred (see
``preferences``) until its next request is there, or the time named is over.

Nothing depends on what is said: an unknown name changes nothing, what preferences may cover is bounded, and a clock
that is behind where it was takes back what was said before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unified_cache.pool import Tier
from unified_cache.tree.node import Node
from unified_cache.tree.preferences import Preference, Preferences
from unified_cache.tree.state import TreeState

__all__ = ["SessionHints"]

SESSIONS_MAX = 16_384
"""Sessions that are known; one more makes the one forgotten that was heard of longest ago."""


@dataclass(frozen=True, slots=True)
class ExpectedReturn:
    """Preferences for a session that comes back."""

    preferences: tuple[Preference, ...]
    said_s: float
    lapses_s: float
    """Time of the clock from which on it is kept no more."""


class SessionHints:
    """Known sessions of one tree, by name, and what is kept for those that come back."""

    __slots__ = ("_clock", "_ends", "_expected", "_preferences", "_tree")

    def __init__(self, tree: TreeState, preferences: Preferences, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._preferences = preferences
        self._clock = clock
        self._ends: dict[str, Node] = {}
        """Node where the last prompt of each session ends, or ended while it lived; that heard of last at the end."""
        self._expected: dict[str, ExpectedReturn] = {}

    def note_end(self, session: str, node: Node) -> None:
        """Note that the last prompt of a session, given back now, ends with ``node``."""
        self._ends.pop(session, None)
        self._ends[session] = node
        if len(self._ends) > SESSIONS_MAX:
            forgotten = next(iter(self._ends))
            self.note_arrival(forgotten)
            del self._ends[forgotten]

    def note_arrival(self, session: str) -> None:
        """Note that a request of a session is there, for which nothing needs to be kept any more."""
        expected = self._expected.pop(session, None)
        if expected is not None:
            self._take_back(expected)

    def expect(self, session: str, within_s: float) -> bool:
        """Prefer the last prompt of a session until it comes back, or that time is over; tell whether anything is.

        What was said of it before does not count any more.
        """
        self.lapse()
        self.note_arrival(session)
        node = self._ends.get(session)
        if node is None or node.dead:
            return False
        components = self._tree.components_count
        tiers = [tier for tier in Tier if node.held_count[int(tier) * components]]
        made = [self._preferences.prefer(node, node.end, tier) for tier in tiers]
        preferences = tuple(each for each in made if each is not None)
        now_s = self._clock()
        if preferences:
            self._expected[session] = ExpectedReturn(preferences, now_s, now_s + within_s)
        return bool(preferences)

    def lapse(self) -> None:
        """Keep nothing any more for sessions that have not come back in time."""
        if not self._expected:
            return
        now_s = self._clock()
        for session, expected in list(self._expected.items()):
            if not expected.said_s <= now_s < expected.lapses_s:
                del self._expected[session]
                self._take_back(expected)

    def _take_back(self, expected: ExpectedReturn) -> None:
        for preference in expected.preferences:
            self._preferences.unprefer(preference)

    def preferences_out(self) -> Iterator[Preference]:
        """Yield what is preferred for sessions that come back; for ``check``."""
        for expected in self._expected.values():
            yield from expected.preferences
