"""Work of one call to a store, part by part: labels that are asked for, and what has no answers for pages.

Pages on their way are work as well, see ``transfer``.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from unified_cache.external.transfer import Clock
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Answer, StorageBackend

__all__ = ["LabelWork", "LabelledWork", "SingleCall", "TouchWork"]

LOOKUP_LABELS_MAX = 1024
"""Labels of one call to the store, which takes some 10 us for each where they are files."""


class LabelledWork(Protocol):
    """Work of one call, page by page or label by label."""

    answers: list[Answer]
    """Answers of the store so far, in order."""

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Ask the store, part by part, as long as ``until_s`` has not come; raises as the store does."""
        ...

    def let_go(self) -> None:
        """Let go of the engine's memory, now and for good."""
        ...


class LabelWork:
    """Labels that the store is asked about; no page moves."""

    __slots__ = ("_ask", "_labels", "answers")

    def __init__(self, labels: Sequence[Label], ask: Callable[[Sequence[Label]], list[Answer]]) -> None:
        self._labels = labels
        self._ask = ask
        self.answers: list[Answer] = []

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Ask part by part, as long as ``until_s`` has not come."""
        for start in range(0, len(self._labels), LOOKUP_LABELS_MAX):
            if clock() >= until_s:
                return
            self.answers += self._ask(self._labels[start : start + LOOKUP_LABELS_MAX])

    def let_go(self) -> None:
        """Do nothing: labels are not the engine's memory."""


class TouchWork:
    """Labels to be touched, the last of them first, so that the first are the most recent in the end."""

    __slots__ = ("_labels", "_touch", "answers", "touched_count")

    def __init__(self, labels: Sequence[Label], touch: Callable[[Sequence[Label]], None]) -> None:
        self._labels = labels
        self._touch = touch
        self.answers: list[Answer] = []
        self.touched_count = 0

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Touch part by part, as long as ``until_s`` has not come."""
        for end in range(len(self._labels), 0, -LOOKUP_LABELS_MAX):
            if clock() >= until_s:
                return
            part = self._labels[max(end - LOOKUP_LABELS_MAX, 0) : end]
            self._touch(part)
            self.touched_count += len(part)

    def let_go(self) -> None:
        """Do nothing: labels are not the engine's memory."""


class SingleCall:
    """One call that has no answers for pages."""

    __slots__ = ("_call", "answers")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.answers: list[Answer] = []

    def run(self, store: StorageBackend, until_s: float, clock: Clock) -> None:
        """Make the call."""
        self._call()

    def let_go(self) -> None:
        """Do nothing: it holds no memory of the engine's."""
