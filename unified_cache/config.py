"""Sizes and bounds of one cache, validated as one frozen value."""

from dataclasses import dataclass

from unified_cache.errors import ConfigError

__all__ = ["CacheConfig", "Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """Where along its prompt a request leaves the windows and states that a later request needs to resume there.

    Full attention can be resumed at any page; a window or a recurrent state only where it was kept. Prompts are
    continued from where they end, and share beginnings: so it is kept where the prompt ends and, with ``branches``,
    where it leaves what other prompts have been through before it. What stands at the very end of a prompt is often
    not the beginning of its continuation (a template's last tokens, a partial block), so with ``tail_tokens`` it is
    kept at every page boundary of that many tokens before the end, too.
    """

    tail_tokens: int = 0
    """Every page boundary less than this many tokens before the prompt's last one can be resumed at, too."""
    branches: bool = True
    """Whether the place can be resumed at where the prompt leaves the tree: its second visitor pays for it."""

    def __post_init__(self) -> None:
        if self.tail_tokens < 0:
            raise ConfigError(f"tail_tokens must not be negative, found {self.tail_tokens}")

    def ends(self, pages_count: int, branch_end: int, page_size: int) -> tuple[int, ...]:
        """Return the ends, ascending, for a prompt of ``pages_count`` pages that leaves the tree at ``branch_end``."""
        tail_pages = max(1, -(-self.tail_tokens // page_size))
        ends = set(range(max(pages_count - tail_pages, 0) + 1, pages_count + 1))
        if self.branches:
            ends.add(branch_end)
        return tuple(sorted(ends - {0}))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much each tier holds, and how much may be under way at a time."""

    device_pages: tuple[int, ...]
    """By component: cacheable pages on the device. The pools have one slot more, the padding sink."""
    host_pages: tuple[int, ...]
    """By component: pages in host memory; all zero for a cache without a host tier."""
    operations_max: int = 256
    """Transfers under way at a time; one more is declined. Bounds every queue."""
    storage_workers: int = 2
    """Threads that talk to storage, so that one slow call does not hold up all others."""
    retention: Retention = Retention()
    """What requests leave for later ones; see ``UnifiedCache.resume_ends``."""
    close_timeout_s: float = 10.0
    """How long ``close`` waits for transfers under way."""

    def __post_init__(self) -> None:
        if len(self.device_pages) != len(self.host_pages):
            raise ConfigError(
                f"device_pages and host_pages need an entry for each component, "
                f"found {len(self.device_pages)} and {len(self.host_pages)}"
            )
        if any(pages < 1 for pages in self.device_pages):
            raise ConfigError(f"device_pages must be positive, found {self.device_pages}")
        if any(pages < 0 for pages in self.host_pages):
            raise ConfigError(f"host_pages must not be negative, found {self.host_pages}")
        if any(self.host_pages) and not all(self.host_pages):
            raise ConfigError(f"host_pages must be zero for all components or for none, found {self.host_pages}")
        if self.operations_max < 1:
            raise ConfigError(f"operations_max must be positive, found {self.operations_max}")
        if self.storage_workers < 1:
            raise ConfigError(f"storage_workers must be positive, found {self.storage_workers}")
        if not self.close_timeout_s > 0:
            raise ConfigError(f"close_timeout_s must be positive, found {self.close_timeout_s}")
