"""Recorded calls on the prefix tree of SGLang 0.5.23: how they are written, and ours under the same calls.

One call a line: what was asked, ``->``, what the engine's tree answered, ``|``, evictable and protected pages after.

    match    PROMPT               -> pages matched, slots
    touch    PROMPT
    insert   PROMPT START SLOTS   -> pages held before, slots, slots freed as duplicates
    lock     NUMBER PROMPT
    unlock   NUMBER
    evict    PAGES                -> slots freed, an entry for each node
    reset

A prompt is written as runs ``first+count`` of consecutive token ids, with ``@extra_key/cache_salt`` if it has either;
slots are those of pages, as ranges ``first-last``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from unified_cache.integrations.sglang.tree_slots import EngineSlotTree, TreePrefix
from unified_cache.page import Namespace, Prompt
from unified_cache.pool import Slots
from unified_cache.tree import Lock

__all__ = ["ReplayedTree", "prompt_text", "replay", "slots_text"]

NOTHING = "-"


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the runs of consecutive numbers."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
        else:
            if count:
                yield first, count
            first, count = number, 1
    if count:
        yield first, count


def prompt_text(tokens: Iterable[int], extra_key: str | None, cache_salt: str | None) -> str:
    """Write a prompt."""
    text = ",".join(f"{first}+{count}" for first, count in runs(tokens)) or NOTHING
    return text if extra_key is cache_salt is None else f"{text}@{extra_key or ''}/{cache_salt or ''}"


def slots_text(slots: Iterable[int]) -> str:
    """Write slots of pages."""
    return ",".join(f"{first}-{first + count - 1}" for first, count in runs(slots)) or NOTHING


def slots_of(text: str) -> Slots:
    """Read what ``slots_text`` wrote."""
    spans = [tuple(map(int, part.split("-"))) for part in text.split(",")] if text != NOTHING else []
    return np.array([slot for first, last in spans for slot in range(first, last + 1)], np.int32)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Prompts as a recording writes them."""

    page_size: int
    bigrams: bool

    def read(self, text: str) -> Prompt:
        """Read what ``prompt_text`` wrote."""
        tokens_text, _, names = text.partition("@")
        extra_key, _, cache_salt = names.partition("/")
        parts = [part.split("+") for part in tokens_text.split(",")] if tokens_text != NOTHING else []
        tokens = [token for first, count in parts for token in range(int(first), int(first) + int(count))]
        namespace = Namespace(extra_key or None, cache_salt or None, bigrams=self.bigrams)
        return Prompt.of(np.array(tokens, np.int64), self.page_size, namespace, whole=True)


class ReplayedTree:
    """Our tree under recorded calls; each method returns the answer as a recording writes it."""

    def __init__(self, page_size: int, *, bigrams: bool) -> None:
        self.tree = EngineSlotTree(page_size)
        self._reader = PromptReader(page_size, bigrams)
        self._locks: dict[str, Lock] = {}

    def call(self, words: list[str]) -> str:
        """Make one call and return its answer."""
        match words:
            case ["match", prompt]:
                found = self.tree.match(self._reader.read(prompt))
                return f"{found.end} {slots_text(self.tree.slots(found).tolist())}"
            case ["touch", prompt]:
                self.tree.match(self._reader.read(prompt))
                return ""
            case ["insert", text, start, given]:
                given_to = self._reader.read(text)
                taken = self.tree.insert(given_to, int(start), slots_of(given))
                held = self.tree.slots(TreePrefix.whole(given_to))
                freed = sorted(taken.duplicates.tolist())
                return f"{taken.matched_end} {slots_text(held.tolist())} {slots_text(freed)}"
            case ["lock", number, text]:
                self._locks[number] = self.tree.lock(TreePrefix.whole(self._reader.read(text)))
                return ""
            case ["unlock", number]:
                self.tree.unlock(self._locks.pop(number))
                return ""
            case ["evict", pages]:
                return " ".join(slots_text(slots.tolist()) for slots in self.tree.evict(int(pages))) or NOTHING
            case ["reset"]:
                self.tree.clear()
                self._locks.clear()
                return ""
        raise ValueError(f"expected a call, found {words}")

    def sizes(self) -> str:
        """Write evictable and protected pages."""
        return f"{self.tree.evictable_pages} {self.tree.protected_pages}"


def replay(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Make the calls of a recording; yield each line with what ours makes of it: equal, or the tree differs.

    The first line says the size of a page, and whether pages are of bigrams.
    """
    numbered = iter(lines)
    first = next(numbered).split()
    tree = ReplayedTree(int(first[1]), bigrams="bigrams" in first)
    for line in numbered:
        asked = line.split(" ->")[0].split(" |")[0]
        answer = tree.call(asked.split())
        yield line, f"{asked} -> {answer} | {tree.sizes()}" if answer else f"{asked} | {tree.sizes()}"
    tree.tree.check()
