"""KV events as values, whatever form they are sent in."""

from dataclasses import dataclass
from enum import IntEnum

from unified_cache.core.page import PageKey
from unified_cache.core.window import SPAN_ALL


class Medium(IntEnum):
    """Tier that a page lies in, as routers see it."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A run of pages that one component holds on a tier from now on (BlockStored)."""

    medium: Medium
    group: int
    """Number of the component: of the KV cache group, in vLLM's words."""
    hashes: tuple[PageKey, ...]
    """One for each page."""
    parent: PageKey | None
    """The page before the run; None at the beginning of a prompt."""
    tokens: tuple[int, ...]
    """Of all pages, in order; of pages of bigrams both tokens of each pair."""
    page_size: int
    """Tokens per page."""
    lora_name: str | None = None
    extra_keys: tuple[tuple[str | tuple[str, int], ...] | None, ...] = ()
    """By page: what its hash depends on beside its tokens; empty for nothing. Of each medium that reaches into a page
    the digest, and where in the page it begins, negative if that is before it; as in vLLM 0.32."""
    span: int = SPAN_ALL
    """Pages before an end that a resume there needs of this component."""
    spans: tuple[int, ...] = ()
    """``span`` of every component of the model."""


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """Pages that one component holds on a tier no longer (BlockRemoved)."""

    medium: Medium
    group: int
    hashes: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """No tier holds anything, as far as the engine knows (AllBlocksCleared)."""


KvEvent = StoredEvent | RemovedEvent | ClearedEvent
