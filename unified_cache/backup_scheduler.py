"""Scheduling of backups: one small class for each write policy (write-through, selective, write-back)."""

from collections import OrderedDict, deque
from typing import Protocol

from unified_cache.config import CacheConfig, WritePolicy
from unified_cache.errors import ConfigError
from unified_cache.page import PageKey, Prompt

__all__ = ["BackupScheduler", "WriteStrategy"]

DIRTY_PROMPTS_MAX = 4096
"""Prompts that a policy puts off at most, however short they are."""

DUE_PROMPTS_MAX = 4096
"""Prompts that are due at most; where more are, those that have been due longest are not backed up."""


class WriteStrategy(Protocol):
    """A write policy: learns what requests do, and returns the prompts to back up now."""

    def reused(self, prompt: Prompt) -> list[Prompt]:
        """Note that a request uses a prompt which another one left on the device."""
        ...

    def inserted(self, prompt: Prompt, new_pages: int) -> list[Prompt]:
        """Note that a prompt is on the device, its last ``new_pages`` pages for the first time."""
        ...

    def rest(self) -> list[Prompt]:
        """Return all that was put off: the policy changes, or the cache is closed."""
        ...


class WriteOnCall:
    """Back up on call only."""

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
    """Write-through: back up every prompt as soon as it is inserted."""

    def inserted(self, prompt: Prompt, new_pages: int) -> list[Prompt]:
        """Back it up."""
        return [prompt]


class WriteThroughSelective(WriteOnCall):
    """Write-through selective: back up a prompt when it is used a second time."""

    def reused(self, prompt: Prompt) -> list[Prompt]:
        """Back up what was used before; what is new has to be used again first."""
        return [prompt]


class WriteBack(WriteOnCall):
    """Write-back: back up the oldest dirty prompts once more than ``dirty_pages_max`` device pages wait."""

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


class BackupScheduler:
    """The write policy in force, and a bounded queue of the prompts that are due for a backup."""

    def __init__(self, config: CacheConfig) -> None:
        """Follow ``config.write``.

        Raises:
            ConfigError: it writes, and there is no host tier to write to.
        """
        self._due: deque[Prompt] = deque(maxlen=DUE_PROMPTS_MAX)
        self._writer = _writer_of(config)

    def reused(self, prompt: Prompt) -> None:
        """Note that a request uses a prompt which another one left on the device."""
        self._due += self._writer.reused(prompt)

    def inserted(self, prompt: Prompt, new_pages: int) -> None:
        """Note that a prompt is on the device, its last ``new_pages`` pages for the first time."""
        self._due += self._writer.inserted(prompt, new_pages)

    def follow(self, config: CacheConfig) -> None:
        """Go on with another policy; what the old one has put off is due now.

        Raises:
            ConfigError: as on construction; the old policy stays.
        """
        writer = _writer_of(config)
        self.give_up_waiting()
        self._writer = writer

    def give_up_waiting(self) -> None:
        """Make all that the policy has put off due."""
        self._due += self._writer.rest()

    def take(self, prompts_max: int) -> list[Prompt]:
        """Return what is to be backed up now, the longest due first, at most ``prompts_max``."""
        return [self._due.popleft() for _ in range(min(prompts_max, len(self._due)))]


def _writer_of(config: CacheConfig) -> WriteStrategy:
    policy = config.write
    if policy is not WritePolicy.ON_CALL and not config.host_pages[0]:
        raise ConfigError(f"the write policy {policy.value} needs host pages, found {config.host_pages}")
    if policy is WritePolicy.BACK:
        return WriteBack(int(config.device_pages[0] * config.dirty_share))
    return {
        WritePolicy.ON_CALL: WriteOnCall,
        WritePolicy.THROUGH: WriteThrough,
        WritePolicy.SELECTIVE: WriteThroughSelective,
    }[policy]()
