"""Preferences: prefixes that a caller would rather keep. They bias the order of eviction, and forbid none.

A preferred page is evicted when nothing else of its component is left on its tier. The pages that preferences cover are
bounded, and one too many is declined. A preference covers pages ``[window(end), end)`` per component on one tier, and
Full's prefix, by marking their nodes. What leaves the tree leaves its preference, unless the other tier keeps its node.

An engine may also say that a session (``Prompt.session``) comes back. Of each is known the node where the prompt ends
that was given back last; that prompt is preferred until the next request of the session, or the time named is over. A
clock that is behind where it was takes back what was said before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from unified_cache.core.pool import Tier
from unified_cache.core.window import window
from unified_cache.tree.node import Node
from unified_cache.tree.state import TreeState

__all__ = ["Preference", "Preferences", "SessionHints"]


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """Receipt for a preferred prefix."""

    node: Node
    """The node that ended at ``end`` when it was preferred."""
    end: int
    tier: Tier
    starts: tuple[int, ...]
    """First preferred page of each component; the last one is ``end - 1``."""


class Preferences:
    """The preferences of one tree, and the bound on what they cover."""

    __slots__ = ("_pages", "_pages_max", "_tree", "live")

    def __init__(self, tree: TreeState, pages_max: Sequence[int]) -> None:
        self._tree = tree
        self._pages_max = tuple(pages_max)
        """Most pages that preferences may cover, by tier and component."""
        self._pages = [0] * len(self._pages_max)
        """Pages that preferences cover, by tier and component, held or not, counted once for each preference."""
        self.live: set[Preference] = set()

    def prefer(self, node: Node, end: int, tier: Tier) -> Preference | None:
        """Prefer ``end`` pages, which end in ``node``; None, with nothing changed, if that were too many.

        Cuts nodes at ``end`` and where a window begins, so that pages of other prompts are not preferred with them.
        """
        tree = self._tree
        windows = [window(end, span) for span in tree.spans]
        # What stands on a page goes with it, so a component is preferred as far back as those that stand on it.
        starts = tuple(accumulate(reversed(windows), min))[::-1]
        tier_components = range(int(tier) * tree.components_count, (int(tier) + 1) * tree.components_count)
        if any(
            self._pages[tier_component] + end - start > self._pages_max[tier_component]
            for tier_component, start in zip(tier_components, starts, strict=True)
        ):
            return None
        if end < node.end:
            node = tree.split(node, end - node.start)
        for start in set(starts):
            self._cut(node, start)
        made = Preference(node, end, tier, starts)
        self.live.add(made)
        self._mark(made, 1)
        return made

    def unprefer(self, preference: Preference) -> None:
        """Take a preference back. Once more, or after ``clear``, changes nothing."""
        if preference in self.live:
            self.live.remove(preference)
            self._mark(preference, -1)

    def _cut(self, node: Node, page: int) -> None:
        """Make a node of the path to ``node`` begin at ``page``; the nodes of the path keep their lower parts."""
        at = node
        while at.start > page:
            assert at.parent is not None
            at = at.parent
        if at.start < page:
            self._tree.split(at, page - at.start)

    def _mark(self, preference: Preference, count: int) -> None:
        queues = self._tree.queues
        components = self._tree.components_count
        for component, start in enumerate(preference.starts):
            tier_component = int(preference.tier) * components + component
            self._pages[tier_component] += count * (preference.end - start)
            for node in nodes_of(preference, start):
                queues.history(node, tier_component).preferences += count
                queues.offer(node, tier_component)

    def covered(self) -> list[int]:
        """Return by tier and component the pages that live preferences cover; at most the bound."""
        assert all(pages <= most for pages, most in zip(self._pages, self._pages_max, strict=True)), (
            "too much is preferred"
        )
        return list(self._pages)


def nodes_of(preference: Preference, start: int) -> list[Node]:
    """Return the nodes in the tree that hold pages [start, end) of a preference."""
    found: list[Node] = []
    at: Node | None = preference.node
    while at is not None and at.parent is not None and at.start >= start:
        if not at.dead:
            found.append(at)
        at = at.parent
    return found


SESSIONS_MAX = 16_384
"""Sessions that are known; one more drops the one seen longest ago."""


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
        """Node where the last prompt of each session ends, or ended while it lived; the latest named at the end."""
        self._expected: dict[str, ExpectedReturn] = {}

    def record_end(self, session: str, node: Node) -> None:
        """Record ``node`` as the end of a session's last prompt, which is released now."""
        self._ends.pop(session, None)
        self._ends[session] = node
        if len(self._ends) > SESSIONS_MAX:
            forgotten = next(iter(self._ends))
            self.record_arrival(forgotten)
            del self._ends[forgotten]

    def record_arrival(self, session: str) -> None:
        """Record a request of a session, and end the preference for its pages."""
        expected = self._expected.pop(session, None)
        if expected is not None:
            self._take_back(expected)

    def expect(self, session: str, within_s: float) -> bool:
        """Prefer the last prompt of a session until it comes back, or the time is over; return whether anything is."""
        self.lapse()
        self.record_arrival(session)
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
