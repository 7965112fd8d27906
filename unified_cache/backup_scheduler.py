"""Scheduling of backups: one small class for each write policy (write-through, selective, write-back)."""

from collections import OrderedDict, deque
from typing import Protocol

from unified_cache.config import CacheConfig, WritePolicy
from unified_cache.controller import Operation, OperationState
from unified_cache.errors import ConfigError
from unified_cache.page import PageKey, Prompt

__all__ = ["BackupScheduler", "WriteStrategy"]

DIRTY_PROMPTS_MAX = 4096
"""Prompts that a policy puts off at most, however short they are."""

DUE_PROMPTS_MAX = 4096
"""Prompts that are due at most; where more are, those that have been due longest are not backed up."""

OWED_PROMPTS_MAX = 4096
"""Prompts at most whose backup failed and is made up for, however short they are."""


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

    @property
    def loses_nothing(self) -> bool:
        """Whether every prompt is to be backed up, and so what the device evicts is copied to the host before."""
        ...


class WriteOnCall:
    """Back up on call only."""

    loses_nothing = False

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

    loses_nothing = True

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

    loses_nothing = True

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


class OwedBackups:
    """Prompts whose backup failed, or that storage did not take, until another backup shows that it works again.

    All together have at most ``pages_max`` pages, but for a single one; those that failed first are given up first.
    """

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._pages = 0
        self._prompts: OrderedDict[PageKey, Prompt] = OrderedDict()

    def add(self, prompt: Prompt) -> None:
        """Remember a prompt, behind the others."""
        key = prompt.keys[-1]
        if key not in self._prompts:
            self._prompts[key] = prompt
            self._pages += prompt.pages_count
        self._prompts.move_to_end(key)
        while len(self._prompts) > 1 and (self._pages > self._pages_max or len(self._prompts) > OWED_PROMPTS_MAX):
            self._remove_first()

    def take_first(self) -> list[Prompt]:
        """Return and forget the prompt that has waited longest; nothing if there is none."""
        return [self._remove_first()] if self._prompts else []

    def take_all(self) -> list[Prompt]:
        """Return and forget all, the one first that has waited longest."""
        return [self._remove_first() for _ in range(len(self._prompts))]

    def _remove_first(self) -> Prompt:
        _, prompt = self._prompts.popitem(last=False)
        self._pages -= prompt.pages_count
        return prompt


class BackupScheduler:
    """The write policy in force, and a bounded queue of the prompts that are due for a backup."""

    def __init__(self, config: CacheConfig) -> None:
        """Follow ``config.write``.

        Raises:
            ConfigError: it writes, and there is no host tier to write to.
        """
        self._due: deque[Prompt] = deque(maxlen=DUE_PROMPTS_MAX)
        self._running: dict[Operation, Prompt] = {}
        self._owed = OwedBackups(config.host_pages[0])
        self._writer = _writer_of(config)

    @property
    def loses_nothing(self) -> bool:
        """Whether what the device evicts is to be copied to the host before."""
        return self._writer.loses_nothing

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
        """Make all due that the policy has put off, and what failed before."""
        self._due += self._writer.rest()
        self._due += self._owed.take_all()

    def take(self, prompts_max: int) -> list[Prompt]:
        """Return what is to be backed up now, the longest due first, at most ``prompts_max``."""
        self._look_at_ends()
        return [self._due.popleft() for _ in range(min(prompts_max, len(self._due)))]

    def started(self, prompt: Prompt, operation: Operation | None) -> None:
        """Note the backup of a prompt that was due, what comes of it counts; None if it was declined."""
        if operation is not None:
            self._running[operation] = prompt

    def _look_at_ends(self) -> None:
        """Remember the prompts whose backups have failed; one that did not makes the oldest of those due again.

        One after the other, so that a store that takes some pages and fails on others is not asked for ever.
        """
        if not self._running:
            return
        over = [operation for operation in self._running if operation.state is not OperationState.RUNNING]
        for operation in over:
            prompt = self._running.pop(operation)
            if operation.state is OperationState.FAILED or operation.unstored_count:
                self._owed.add(prompt)
            elif operation.state is OperationState.DONE:
                self._due += self._owed.take_first()


def _writer_of(config: CacheConfig) -> WriteStrategy:
    policy = config.write
    if policy is WritePolicy.THROUGH and not config.host_pages[0]:
        return WriteOnCall()  # through a host tier that is not there: nothing to write to
    if policy is not WritePolicy.ON_CALL and not config.host_pages[0]:
        raise ConfigError(f"the write policy {policy.value} needs host pages, found {config.host_pages}")
    if policy is WritePolicy.BACK:
        return WriteBack(int(config.device_pages[0] * config.dirty_share))
    return {
        WritePolicy.ON_CALL: WriteOnCall,
        WritePolicy.THROUGH: WriteThrough,
        WritePolicy.SELECTIVE: WriteThroughSelective,
    }[policy]()
