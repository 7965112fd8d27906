"""Which prompts are backed up when: one small class for each write policy."""

from collections import OrderedDict
from typing import Protocol

from unified_cache.config import WritePolicy
from unified_cache.page import PageKey, Prompt

__all__ = ["Writer", "writer_of"]

DIRTY_PROMPTS_MAX = 4096
"""Prompts that wait for their backup at most, however short they are."""


class Writer(Protocol):
    """Told what requests do; says what to back up now."""

    def reused(self, prompt: Prompt) -> list[Prompt]:
        """Note that a request uses a prompt which another one left on the device."""
        ...

    def inserted(self, prompt: Prompt, new_pages: int) -> list[Prompt]:
        """Note that a prompt is on the device, its last ``new_pages`` pages for the first time."""
        ...

    def rest(self) -> list[Prompt]:
        """Give up all that waits: the policy changes, or the engine stops."""
        ...


class WriteOnCall:
    """Nothing by itself."""

    def reused(self, prompt: Prompt) -> list[Prompt]:
        """Back up nothing."""
        return []

    def inserted(self, prompt: Prompt, new_pages: int) -> list[Prompt]:
        """Back up nothing."""
        return []

    def rest(self) -> list[Prompt]:
        """Nothing waits."""
        return []


class WriteThrough(WriteOnCall):
    """Everything at once."""

    def inserted(self, prompt: Prompt, new_pages: int) -> list[Prompt]:
        """Back it up."""
        return [prompt]


class WriteThroughSelective(WriteOnCall):
    """What is used a second time."""

    def reused(self, prompt: Prompt) -> list[Prompt]:
        """Back up what was used before; what is new has to be used again first."""
        return [prompt]


class WriteBack(WriteOnCall):
    """The oldest prompts, once more than ``dirty_pages_max`` pages of the device wait."""

    def __init__(self, dirty_pages_max: int) -> None:
        self._dirty_pages_max = dirty_pages_max
        self._dirty_pages = 0
        self._dirty: OrderedDict[PageKey, tuple[Prompt, int]] = OrderedDict()

    def inserted(self, prompt: Prompt, new_pages: int) -> list[Prompt]:
        """Let it wait behind the others; back up those that have waited longest and are too many."""
        key = prompt.keys[-1]
        _, waiting_pages = self._dirty.pop(key, (prompt, 0))
        self._dirty[key] = (prompt, waiting_pages + new_pages)
        self._dirty_pages += new_pages
        due: list[Prompt] = []
        while self._dirty and (self._dirty_pages > self._dirty_pages_max or len(self._dirty) > DIRTY_PROMPTS_MAX):
            _, (oldest, pages) = self._dirty.popitem(last=False)
            self._dirty_pages -= pages
            due.append(oldest)
        return due

    def rest(self) -> list[Prompt]:
        """Back up all of them."""
        waiting = [prompt for prompt, _ in self._dirty.values()]
        self._dirty.clear()
        self._dirty_pages = 0
        return waiting


def writer_of(policy: WritePolicy, dirty_pages_max: int) -> Writer:
    """Return who carries a policy out; ``dirty_pages_max`` is for ``WritePolicy.BACK``."""
    if policy is WritePolicy.BACK:
        return WriteBack(dirty_pages_max)
    return {
        WritePolicy.ON_CALL: WriteOnCall,
        WritePolicy.THROUGH: WriteThrough,
        WritePolicy.SELECTIVE: WriteThroughSelective,
    }[policy]()
