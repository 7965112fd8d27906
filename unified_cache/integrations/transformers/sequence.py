"""One request, step by step: its cached prefix, the chunks of its prompt, then one token after another.

[0, own_end)         pages of the ``Request``: pinned in the tree, or filled here and not handed over yet
[own_end, length)    tokens of no whole page, or of pages that had no room: in the model's own cache object alone
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TypeAlias

import torch
from transformers import DynamicCache

from unified_cache.cache.cache import UnifiedCache
from unified_cache.cache.request import Request
from unified_cache.controller import TransferKind
from unified_cache.core.errors import InputError, StateError
from unified_cache.core.page import MediaItem, Namespace
from unified_cache.core.pool import Hits
from unified_cache.integrations.transformers.pages import DevicePages

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


class Sequence:
    """A running request. Call ``step`` until it is READY, then ``feed`` token after token; at last ``finish``.

    At any time ``abort`` gives back what it holds instead; so does leaving its ``with`` block by an exception.
    """

    __slots__ = (
        "_cache",
        "_chunk_pages",
        "_is_over",
        "_media",
        "_namespace",
        "_pages",
        "_prompt",
        "_request",
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
        self._request: Request | None = None
        """From the first step to the end."""
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
        self.reused = Hits()
        """Tokens of the prompt that are not computed again, by the tier that they came from."""
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
        self._request = request = self._cache.bring(self._prompt)
        while not request.advance():
            yield Stage.FETCH if request.moving is TransferKind.PREFETCH else Stage.LOAD
        start, count = request.lock.end, self._prompt.pages_count
        components = range(len(self._pages.layout.components))
        self.past = self._pages.restore([request.slots(number) for number in components], start)
        self.reused = request.hits.tokens(self._page_size, len(self.tokens))
        yield Stage.RESTORE
        request.allocate()
        while start < count:
            end = self._chunk_end(start)
            self._compute(start * self._page_size, end * self._page_size)
            if request.own_end >= end:
                first = start - request.lock.end
                self._pages.capture(self.past, [slots[first : first + end - start] for slots in request.own])
            start = end
            yield Stage.COMPUTE
        if start * self._page_size < len(self.tokens):
            self._compute(start * self._page_size, len(self.tokens))
            yield Stage.COMPUTE
        request.insert()

    def _chunk_end(self, start: int) -> int:
        """Return where the chunk from page ``start`` on ends.

        At a multiple of the chunk size, or earlier: where the model would otherwise release state that is kept.
        """
        end = min((start // self._chunk_pages + 1) * self._chunk_pages, self._prompt.pages_count)
        request = self._request
        if request is None or request.own_end < end:
            return end
        first = start - request.lock.end
        return self._pages.chunk_end(start, end, [slots[first:] for slots in request.own])

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
        end = len(self.tokens) // self._page_size
        if self._request is None or end != self._request.own_end + 1:
            return  # there was no room for the page before this one
        page = self._request.allocate(end, [end])
        if page is not None:
            self._pages.capture(self.past, page)
            self._request.trim(end)

    # ---- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Hand over the pages filled since the prompt, so that the next turn goes on from them; give back the rest.

        Before it is READY this is ``abort``. Once the request is over it does nothing.
        """
        if self.stage is Stage.READY and self._request is not None:
            self._request.insert(self._cache.prompt(self.tokens, self._namespace, media=list(self._media)))
        self.abort()

    def abort(self) -> None:
        """Give back everything that the request holds; what it has handed over stays cached. Twice is once."""
        self._is_over = True
        self.stage = None
        if self._request is not None:
            self._request.close()
            self._request = None

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
