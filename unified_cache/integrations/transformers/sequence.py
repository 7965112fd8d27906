"""One request, step by step: its cached prefix, the chunks of its prompt, then one token after another.

    [0, lock.end)            pages of the tree, pinned; their state is in the model's own cache object
    [lock.end, kept_end)     pages that this request has filled and not handed over yet: its own
    [kept_end, length)       tokens of no whole page, or of pages that had no room: in the cache object alone

Between two calls everything that a request holds stands in these two, so that ``abort`` gives it back at any time.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import torch
from transformers import DynamicCache

from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import NotStarted, Operation, OperationState
from unified_cache.core.errors import InputError, StateError
from unified_cache.core.page import MediaItem, Namespace, Prompt
from unified_cache.core.pool import Slots
from unified_cache.integrations.transformers.pages import DevicePages
from unified_cache.tree import Lock

__all__ = ["NO_EMBEDDED", "EmbeddedMedia", "PrefixRestore", "Reused", "Sequence", "Stage"]

EmbeddedMedia: TypeAlias = Mapping[MediaItem, Callable[[], torch.Tensor]]
"""What stands behind placeholder tokens, and what embeds it, shape (tokens, hidden size): called if any is computed."""

NO_EMBEDDED: EmbeddedMedia = {}


class Stage(Enum):
    """Stage of a request after its last step."""

    FETCH = "fetch"
    """Storage is being read; nothing to do but step again later."""
    LOAD = "load"
    """Host memory is being copied to the device; the same."""
    RESTORE = "restore"
    """The prefix that is reused is in the model's own cache object."""
    COMPUTE = "compute"
    """A chunk of the prompt was computed."""
    READY = "ready"
    """The prompt is computed and its pages are kept; ``logits`` say what follows."""


@dataclass(frozen=True, slots=True)
class Reused:
    """Tokens of a prompt that were not computed again, by the tier that they came from."""

    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.device_tokens + self.host_tokens + self.storage_tokens


class PrefixRestore:
    """Brings the longest prefix of a prompt that any tier holds to the device, and counts the tokens of each tier."""

    __slots__ = ("_cache", "_operation", "_prompt", "ends", "lock", "reused")

    def __init__(self, cache: UnifiedCache, prompt: Prompt) -> None:
        self._cache = cache
        self._prompt = prompt
        self._operation: Operation | None = None
        self.lock: Lock | None = None
        """Pins the prefix, once it is there. A caller that takes it sets it to None; else ``abort`` releases it."""
        self.reused = Reused()
        self.ends: frozenset[int] = frozenset()
        """Ends, in pages, at which later requests can resume; see ``UnifiedCache.checkpoint_ends``."""

    def steps(self) -> Iterator[Stage]:
        """Start what is to be moved; yield as long as it moves. The owner polls the cache between two steps."""
        cache, prompt = self._cache, self._prompt
        if cache.match(prompt).host_end < prompt.reusable_pages:
            yield from self._awaiting(cache.prefetch(prompt), Stage.FETCH)
        found = cache.match(prompt)
        if found.host_end > found.device_end:
            yield from self._awaiting(cache.load(prompt), Stage.LOAD)
        found = cache.match(prompt)
        self.ends = frozenset(cache.checkpoint_ends(found))
        self.lock = cache.lock(found)
        self.reused = Reused(*(pages * prompt.page_size for pages in self.lock.hits.by_tier().values()))

    def _awaiting(self, operation: Operation | NotStarted, stage: Stage) -> Iterator[Stage]:
        """Yield while a transfer is under way. What one does not bring that fails or was declined is computed."""
        if operation:
            self._operation = operation
            while operation.state is OperationState.RUNNING:
                yield stage
        self._operation = None

    def abort(self) -> None:
        """Cancel what moves and release what is pinned. Twice is once."""
        if self._operation is not None:
            self._cache.cancel(self._operation)
            self._operation = None
        if self.lock is not None:
            self._cache.release(self.lock)
            self.lock = None


class Sequence:
    """A running request. Call ``step`` until it is READY, then ``feed`` token after token; at last ``finish``.

    At any time ``abort`` gives back what it holds instead; so does leaving its ``with`` block by an exception.
    """

    __slots__ = (
        "_cache",
        "_chunk_pages",
        "_fresh",
        "_is_over",
        "_lock",
        "_media",
        "_namespace",
        "_pages",
        "_prefix",
        "_prompt",
        "_steps",
        "computed_tokens",
        "logits",
        "past",
        "reused",
        "stage",
        "tokens",
    )

    def __init__(
        self,
        cache: UnifiedCache,
        pages: DevicePages,
        tokens: list[int],
        namespace: Namespace,
        chunk_pages: int,
        media: EmbeddedMedia = NO_EMBEDDED,
    ) -> None:
        """Take a prompt of at least one token; nothing is asked or allocated yet.

        Raises:
            InputError: no token, or media outside them.
            TokenError: no token ids.
        """
        if not tokens:
            raise InputError("a prompt has at least one token, found none")
        self._cache = cache
        self._pages = pages
        self._namespace = namespace
        self._chunk_pages = chunk_pages
        self._media = {item: functools.cache(embed) for item, embed in media.items()}
        self._prompt = cache.prompt(tokens, namespace, media=list(media))
        self._prefix = PrefixRestore(cache, self._prompt)
        self._lock: Lock | None = None
        self._fresh: list[Slots] | None = None
        self._is_over = False
        self._steps = self._prefill()
        self.stage: Stage | None = None
        """Result of the last ``step``."""
        self.tokens = list(tokens)
        """The prompt, and what was fed since."""
        self.past: DynamicCache = pages.kept.new_cache()
        """The model's own cache object. A caller that runs it further than ``feed`` must not go on here."""
        self.logits: torch.Tensor | None = None
        """Logits after the last computed token, shape (vocabulary,); of the whole prompt once READY."""
        self.reused = Reused()
        self.computed_tokens = 0
        """Tokens of the prompt that the model was run on."""

    # ---- the prompt ------------------------------------------------------------------------------------------

    def step(self) -> Stage:
        """Do the next piece of work on the prompt, one chunk at most; where bytes are moving, look once, do not wait.

        Raises:
            StateError: the request is over.
        """
        self._check_open()
        self._cache.poll()
        self.stage = next(self._steps, Stage.READY)
        return self.stage

    def _prefill(self) -> Iterator[Stage]:
        cache = self._cache
        yield from self._prefix.steps()
        self._lock, self._prefix.lock = self._prefix.lock, None
        assert self._lock is not None
        components = range(len(self._pages.layout.components))
        self.past = self._pages.restore([cache.slots(self._lock, number) for number in components], self._lock.end)
        self.reused = self._prefix.reused
        yield Stage.RESTORE
        start = self._lock.end
        self._fresh = cache.allocate(cache.pages_to_allocate(start, self._prompt.pages_count, self._prefix.ends))
        while start < self._prompt.pages_count:
            end = self._chunk_end(start)
            self._compute(start * self._page_size, end * self._page_size)
            if self._fresh is not None:
                first = start - self._lock.end
                self._pages.capture(self.past, [each[first : first + end - start] for each in self._fresh])
            start = end
            yield Stage.COMPUTE
        if start * self._page_size < len(self.tokens):
            self._compute(start * self._page_size, len(self.tokens))
            yield Stage.COMPUTE
        self._hand_over()

    def _chunk_end(self, start: int) -> int:
        """Return where the chunk from page ``start`` on ends.

        At a multiple of the chunk size, or earlier: where the model would otherwise release state that is kept.
        """
        end = min((start // self._chunk_pages + 1) * self._chunk_pages, self._prompt.pages_count)
        if self._fresh is None or self._lock is None:
            return end
        first = start - self._lock.end
        return self._pages.chunk_end(start, end, [held[first:] for held in self._fresh])

    def _compute(self, start: int, end: int) -> None:
        rows: dict[int, torch.Tensor] = {}
        for item, embed in self._media.items():
            first, last = max(item.start, start), min(item.start + item.length, end)
            if first < last:
                embedded = embed()
                if len(embedded) != item.length:
                    raise InputError(f"{item} must be embedded as {item.length} rows, found {tuple(embedded.shape)}")
                rows[first - start] = embedded[first - item.start : last - item.start]
        self.logits = self._pages.kept.run(self.past, self.tokens[start:end], rows)
        self.computed_tokens += end - start

    # ---- going on --------------------------------------------------------------------------------------------

    def feed(self, token: int) -> torch.Tensor:
        """Run the model on one more token; return what follows it, shape (vocabulary,). READY requests only.

        Raises:
            StateError: the prompt is not computed yet, or the request is over.
        """
        self._check_open()
        if self.stage is not Stage.READY:
            raise StateError(f"a request goes on once it is ready, found {self.stage}")
        self._cache.poll()
        self.logits = self._pages.kept.run(self.past, [token])
        self.tokens.append(token)
        if len(self.tokens) % self._page_size == 0:
            self._keep_page()
        return self.logits

    def _keep_page(self) -> None:
        """Keep the page that has just been filled, if it joins on to those kept before and there is room."""
        cache, lock = self._cache, self._lock
        assert lock is not None
        end = len(self.tokens) // self._page_size
        kept_end = lock.end + (0 if self._fresh is None else len(self._fresh[0]))
        if end != kept_end + 1:
            return  # there was no room for the page before this one
        page = cache.allocate(cache.pages_to_allocate(end - 1, end, [end]))
        if page is None:
            return
        before = self._fresh or [each[:0] for each in page]
        self._fresh = [np.concatenate(pair) for pair in zip(before, page, strict=True)]
        self._pages.capture(self.past, page)
        cache.trim(
            self._fresh, cache.pages_to_allocate(lock.end, end, cache.config.retention.ends(end, 0, self._page_size))
        )

    # ---- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Hand over the pages filled since the prompt, so that the next turn goes on from them; give back the rest.

        Before it is READY this is ``abort``. Once the request is over it does nothing.
        """
        if self.stage is Stage.READY:
            self._hand_over()
        self.abort()

    def abort(self) -> None:
        """Give back everything that the request holds; what it has handed over stays cached. Twice is once."""
        self._is_over = True
        self.stage = None
        self._prefix.abort()
        if self._fresh is not None:
            self._cache.free(self._fresh)
            self._fresh = None
        if self._lock is not None:
            self._cache.release(self._lock)
            self._lock = None

    def _hand_over(self) -> None:
        """Give the pages that are this request's own to the tree; from then on they are pinned for it."""
        if self._fresh is None or self._lock is None:
            return
        prompt = self._cache.prompt(self.tokens, self._namespace, media=list(self._media))
        prompt = prompt.head(self._lock.end + len(self._fresh[0]))
        count = prompt.pages_count - self._lock.end
        rest = [each[count:] for each in self._fresh]  # a page of bigrams that lacks the token after it
        if count:
            self._lock = self._cache.insert(prompt, [each[:count] for each in self._fresh], self._lock)
        self._fresh = None
        self._cache.free(rest)

    def _check_open(self) -> None:
        if self._is_over:
            raise StateError("the request is over")

    @property
    def _page_size(self) -> int:
        return self._pages.layout.page_size

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.finish()
        else:
            self.abort()
