"""Example 5: a small continuous-batching engine over the prefix cache, with everything that a serving engine does.

One iteration:

    poll      let transfers go on whose bytes have moved
    admit     start requests from the queue, as far as device pages are free
    advance   storage -> host -> device, for those whose prefix is not there yet; nobody waits
    batch     a chunk of each prompt under way, a token of each answer: one forward batch, extend, decode or idle
    place     its metadata, made once, says where every token is written in every pool
    run       the model, then the writes, then one more token of each answer

A serving engine runs its kernels over the pools themselves, all requests of the batch at once. Stock models keep a
cache object for each request and read nothing else, so here the model runs request by request within an iteration, and
the state it leaves is copied to where the metadata says. State written to a wrong place is therefore not seen by the
request itself, but by later requests that are served from those pages: the next turn, another tier, another engine.

python examples/continuous_batching.py
"""
# ruff: noqa: T201 - an example prints to standard output

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from unified_cache import CacheConfig, Identity, Retention, UnifiedCache, open_storage
from unified_cache.core.errors import ConfigError, InputError, StateError
from unified_cache.core.extras import needs_extra
from unified_cache.core.page import DEFAULT_NAMESPACE, Namespace
from unified_cache.core.pool import Hits, Slots
from unified_cache.forward import ForwardBatch, ForwardMode, LayerKind, SwaTranslation, init_metadata, write_locs
from unified_cache.integrations.transformers import DevicePages, KeptState, greedy
from unified_cache.testing.tiny_models import TINY_MODELS, tiny_model

with needs_extra("transformers", "this example"):
    import torch
    from transformers import DynamicCache

SINK = 0
"""Slot of the page that padding goes to."""
POLL_S = 0.0005
"""Pause between two polls while nothing but transfers is in flight."""


class RequestOutcome(Enum):
    """Outcome of a request."""

    FINISHED = "finished"
    """All its tokens are out."""
    ABORTED = "aborted"
    """The caller aborted it; the tokens generated until then stay."""


class GenerationRequest:
    """A prompt and the tokens generated after it. The engine fills it in; the caller that submitted it reads it."""

    __slots__ = (
        "_prompt_tokens",
        "computed_tokens",
        "first_token_s",
        "namespace",
        "outcome",
        "reused",
        "stop",
        "submitted_s",
        "tokens",
        "tokens_max",
    )

    def __init__(
        self,
        prompt: list[int],
        tokens_max: int,
        stop: Collection[int] = (),
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        """Ask for at most ``tokens_max`` tokens after ``prompt``, up to one of ``stop``.

        Raises:
            InputError: nothing to begin with, or nothing to generate.
        """
        if not prompt or tokens_max < 1:
            raise InputError(f"a request needs tokens and room for one more, found {len(prompt)} and {tokens_max}")
        self.tokens = list(prompt)
        """The prompt, and what was generated since."""
        self.tokens_max = tokens_max
        self.stop = frozenset(stop)
        self.namespace = namespace
        self.outcome: RequestOutcome | None = None
        """None as long as it waits or runs."""
        self.reused = Hits()
        self.computed_tokens = 0
        """Tokens of the prompt that the model was run on."""
        self.submitted_s = 0.0
        """Time at which the engine took it, on the engine's clock."""
        self.first_token_s: float | None = None
        """Seconds from ``submitted_s`` until its first token; the time in the queue included."""
        self._prompt_tokens = len(prompt)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._prompt_tokens

    @property
    def generated(self) -> list[int]:
        """Tokens that came out so far; a stop token is the last of them."""
        return self.tokens[self._prompt_tokens :]

    @property
    def length_max(self) -> int:
        """Largest number of tokens, prompt and answer together."""
        return self._prompt_tokens + self.tokens_max

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens are out."""
        count = len(self.tokens) - self._prompt_tokens
        return count == self.tokens_max or (count > 0 and self.tokens[-1] in self.stop)


@dataclass(frozen=True, slots=True, eq=False)
class WriteLocs:
    """Location of each token of a forward; locations past the batch's own tokens are padding."""

    full: torch.Tensor
    """Full token locs, int64, shape (tokens,)."""
    swa: torch.Tensor | None
    """SWA token locs, int32, shape (tokens,); None for a model without sliding windows."""

    def head(self, count: int) -> "WriteLocs":
        """Return those of the first ``count`` tokens."""
        return WriteLocs(self.full[:count], None if self.swa is None else self.swa[:count])

    def tail(self, count: int) -> "WriteLocs":
        """Return those of the tokens after the first ``count``."""
        return WriteLocs(self.full[count:], None if self.swa is None else self.swa[count:])


WriteLocator = Callable[[ForwardBatch], WriteLocs]
"""Returns a location for every token of a batch, and for as many more as padding adds; called in every iteration."""


class PagedWriteLocator:
    """Pads a batch to the length that all ranks agree on, builds its metadata, and reads the locations from it."""

    __slots__ = ("_padded_tokens", "_translation")

    def __init__(
        self, translation: SwaTranslation | None, padded_tokens: Callable[[int], int] = lambda count: count
    ) -> None:
        """Translate by ``translation``, None where no component is reached through Full's slots.

        ``padded_tokens`` returns the length that all ranks need a batch to have; by default its own.
        """
        self._translation = translation
        self._padded_tokens = padded_tokens

    def __call__(self, batch: ForwardBatch) -> WriteLocs:
        """Pad, build the metadata of this forward, and have it say where both kinds of layers write."""
        batch = batch.padded(self._padded_tokens(batch.tokens_count))
        if self._translation is None:
            return WriteLocs(init_metadata(batch, None).out_cache_loc, None)
        metadata = init_metadata(batch, self._translation)
        full, swa = (write_locs(kind, batch, metadata, self._translation) for kind in (LayerKind.FULL, LayerKind.SWA))
        return WriteLocs(full, swa)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens that the next forward runs for one request."""

    running: "RunningRequest"
    start: int
    end: int

    @property
    def tokens(self) -> list[int]:
        """Token ids."""
        return self.running.request.tokens[self.start : self.end]


class RunningRequest:
    """The prefix that a running request locks, the pages it fills, and the cache object that the model reads.

        [0, own_end)    pages that the cache keeps for it, pinned or its own; the last may be filled in part
        [own_end, ...)  pages that had no room: written to the sink, so they live in the cache object alone

    Everything it holds is in ``held``, so that ``abort`` can give it back at any time.

    In each iteration the engine takes a ``chunk``, runs the model, writes its state to ``locs`` and
    calls ``note_computed``.
    """

    __slots__ = (
        "_cache",
        "_chunk_pages",
        "_held",
        "_keeps_answer",
        "_pages",
        "is_ready",
        "past",
        "request",
        "table",
        "tokens_done",
    )

    def __init__(
        self,
        request: GenerationRequest,
        cache: UnifiedCache,
        pages: DevicePages,
        chunk_pages: int,
        *,
        keeps_answer: bool,
    ) -> None:
        """Take a request, and begin to bring what the tiers hold of it.

        Chunks of its prompt end at multiples of ``chunk_pages``. With ``keeps_answer`` the pages that decoding fills
        are kept like those of the prompt.
        """
        self.request = request
        self._cache = cache
        self._held = cache.bring(cache.prompt(request.tokens, request.namespace))
        self._pages = pages
        self._chunk_pages = chunk_pages
        self._keeps_answer = keeps_answer
        self.is_ready = False
        """Whether what the tiers hold has come, so that there is a chunk to run."""
        self.past: DynamicCache = pages.kept.new_cache()
        """The model's own cache object: stock models read nothing else."""
        self.table: list[Slots] = []
        """Device slots of all pages, by component; the sink for tombstones and for pages without room."""
        self.tokens_done = 0
        """Tokens whose state is in ``past``."""

    # ---- before the first forward ----------------------------------------------------------------------------

    def advance(self) -> None:
        """Continue to bring the cached prefix to the device, without waiting; once it is there, begin."""
        if self.is_ready or not self._held.advance():
            return
        held, start = self._held, self._held.lock.end
        self.past = self._pages.restore([held.slots(number) for number in self._components], start)
        self.tokens_done = start * self._page_size
        self.request.reused = held.hits.tokens(self._page_size, len(self.request.tokens))
        self._took(held.allocate())
        self.is_ready = True

    # ---- one forward -----------------------------------------------------------------------------------------

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of the prompt are left to compute."""
        return self.tokens_done < self.request.prompt_tokens

    def chunk(self) -> PrefillChunk:
        """Return what to run next: a chunk of the prompt, or the token generated last. Its last page has a slot."""
        start, page_size = self.tokens_done, self._page_size
        first_page, whole_pages = start // page_size, self.request.prompt_tokens // page_size
        if not self.is_prefilling:
            end = start + 1
        elif first_page < whole_pages:
            end_page = min((first_page // self._chunk_pages + 1) * self._chunk_pages, whole_pages)
            held = [slots[first_page - self._held.lock.end :] for slots in self._held.own]
            end = self._pages.chunk_end(first_page, end_page, held) * page_size
        else:
            end = self.request.prompt_tokens
        last_page = (end - 1) // page_size
        if last_page == self._held.own_end:
            if last_page > whole_pages:
                self._held.trim(last_page)
            self._took(self._held.allocate(last_page + 1, [last_page + 1]))
        return PrefillChunk(self, start, end)

    def locs(self, component: int, start: int, end: int) -> torch.Tensor:
        """Return where a component keeps tokens [start, end): ``slot * page_size + offset``, int64, on the CPU."""
        tokens = torch.arange(start, end)
        slots = torch.zeros(-(-end // self._page_size), dtype=torch.int64)
        held = self.table[component][: len(slots)]
        slots[: len(held)] = torch.from_numpy(held)
        return slots[tokens // self._page_size] * self._page_size + tokens % self._page_size

    def note_computed(self, chunk: PrefillChunk) -> None:
        """Note that a chunk is computed and written; insert the prompt's pages into the tree once all are whole."""
        was_prefilling = self.is_prefilling
        self.tokens_done = chunk.end
        if was_prefilling:
            self.request.computed_tokens += chunk.end - chunk.start
            if not self.is_prefilling:
                self._insert_pages(self.request.prompt_tokens // self._page_size)

    # ---- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Insert the pages that decoding has filled, if they are to be kept; give back the rest."""
        if self._keeps_answer and not self.is_prefilling:
            self._insert_pages(self.tokens_done // self._page_size)
        self.abort()

    def abort(self) -> None:
        """Give back everything; inserted pages stay cached. Idempotent."""
        self._held.close()

    # ---- pages -----------------------------------------------------------------------------------------------

    def _took(self, taken: list[Slots] | None) -> None:
        """Clear the pages that have just got slots."""
        if taken is not None:
            self._pages.clear(taken)
        self._renew_table()

    def _insert_pages(self, end: int) -> None:
        """Insert whole pages up to ``end`` into the tree, as far as they have slots; they stay pinned."""
        self._held.insert(self._cache.prompt(self.request.tokens, self.request.namespace).head(end))
        self._renew_table()

    def _renew_table(self) -> None:
        held, self.table = self._held, []
        for number, own in zip(self._components, held.own, strict=True):
            window = held.slots(number)
            holes = np.full(held.lock.end - len(window), SINK, np.int32)
            self.table.append(np.maximum(np.concatenate((holes, window, own)), SINK))

    @property
    def _page_size(self) -> int:
        return self._pages.layout.page_size

    @property
    def _components(self) -> range:
        return range(len(self._pages.layout.components))


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Bounds of the work that an engine takes on at a time."""

    requests_max: int = 8
    """Running at a time."""
    queue_max: int = 64
    """Waiting at a time; one more is not taken."""
    chunk_pages: int = 1
    """Pages of a prompt in one forward at most. With 1 an answer does not depend on where its prompt was resumed, bit
    by bit: every page is computed in the same chunk."""
    batch_tokens: int = 512
    """Tokens of a batch from which on it takes no further prompt; one has a chunk in every iteration."""
    keeps_answers: bool = True
    """Whether pages that decoding fills are kept for the next turn. They are computed token by token, and so rounded
    differently than a prompt that holds the same tokens."""

    def __post_init__(self) -> None:
        for name, value in (
            ("requests_max", self.requests_max),
            ("queue_max", self.queue_max),
            ("chunk_pages", self.chunk_pages),
            ("batch_tokens", self.batch_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be positive, found {value}")


class BatchingEngine:
    """A serving engine: requests in, tokens out. Borrows cache and pages; one thread owns it, as it does the cache."""

    def __init__(
        self,
        cache: UnifiedCache,
        pages: DevicePages,
        placing: WriteLocator,
        settings: EngineSettings = EngineSettings(),
        *,
        choose: Callable[[torch.Tensor], int] = greedy,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Serve the model of ``pages`` over a ``cache`` opened with them; ``choose`` picks a token given its logits."""
        self.cache = cache
        self.pages = pages
        self.settings = settings
        self.forwards: dict[ForwardMode, int] = dict.fromkeys(ForwardMode, 0)
        """Iterations so far, by the mode of their batch."""
        self._placing = placing
        self._choose = choose
        self._clock = clock
        self._pause = pause
        self._queue: deque[GenerationRequest] = deque()
        self._running: list[RunningRequest] = []
        self._padding = self._run_padding()

    # ---- requests --------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> bool:
        """Take a new request; False, with nothing done, if too many wait already.

        Raises:
            InputError: it would not fit onto the device even alone.
        """
        pages_count = self._pages_needed(request)
        if pages_count > self._device_pages:
            raise InputError(f"a request may come to {self._device_pages} pages, found {pages_count}")
        if len(self._queue) >= self.settings.queue_max:
            return False
        request.submitted_s = self._clock()
        self._queue.append(request)
        return True

    def abort(self, request: GenerationRequest) -> None:
        """Abort a request, queued or running; pages it has inserted stay cached. An ended request is left as it is."""
        if request.outcome is not None:
            return
        request.outcome = RequestOutcome.ABORTED
        if request in self._queue:
            self._queue.remove(request)
        for running in [running for running in self._running if running.request is request]:
            running.abort()
            self._running.remove(running)

    def stream(self, request: GenerationRequest) -> Iterator[int]:
        """Submit a request and yield its tokens as they come, serving all others meanwhile. Leaving early aborts it.

        Raises:
            InputError: as ``submit``.
            StateError: too many wait already.
        """
        if not self.submit(request):
            raise StateError(f"{self.settings.queue_max} requests wait already")
        seen = request.prompt_tokens
        try:
            while request.outcome is None:
                self.step()
                yield from request.tokens[seen:]
                seen = len(request.tokens)
        finally:
            self.abort(request)

    def run(self) -> None:
        """Serve until no request waits or runs."""
        while self._queue or self._running:
            self.step()

    def close(self) -> None:
        """Abort all requests. The caller closes the cache."""
        for request in [*self._queue, *(running.request for running in self._running)]:
            self.abort(request)

    # ---- one iteration ---------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one iteration; where nothing but transfers is under way, pause a moment."""
        self.cache.poll()
        self._admit()
        for running in self._running:
            running.advance()
        chunks = self._chunks()
        batch = self._batch(chunks)
        self.forwards[batch.mode] += 1
        self._write_padding(self._run(chunks, self._placing(batch)))
        if not chunks and self._running:
            self._pause(POLL_S)

    def _admit(self) -> None:
        """Start requests in the order they came, as long as the device has a page for all they may come to."""
        reserved = sum(self._pages_needed(running.request) for running in self._running)
        while self._queue and len(self._running) < self.settings.requests_max:
            reserved += self._pages_needed(self._queue[0])
            if reserved > self._device_pages:
                return
            settings = self.settings
            request = self._queue.popleft()
            self._running.append(
                RunningRequest(
                    request, self.cache, self.pages, settings.chunk_pages, keeps_answer=settings.keeps_answers
                )
            )

    def _chunks(self) -> list[PrefillChunk]:
        """Choose what to run: a token of every answer, and one prompt or more until the batch is full."""
        ready = [running for running in self._running if running.is_ready]
        prompts = [running for running in ready if running.is_prefilling]
        chunks = [running.chunk() for running in ready if not running.is_prefilling]
        tokens_count = len(chunks)
        for number, running in enumerate(prompts):
            if number == 0 or tokens_count < self.settings.batch_tokens:
                chunks.append(running.chunk())
                tokens_count += len(chunks[-1].tokens)
        return chunks

    def _batch(self, chunks: list[PrefillChunk]) -> ForwardBatch:
        """Say in Full locations what a forward writes and what it reads."""
        device = self.pages.kept.model.device
        if not chunks:
            return ForwardBatch.idle(device, 1)
        is_extend = any(chunk.running.is_prefilling for chunk in chunks)
        tables = [torch.from_numpy(chunk.running.table[0]) for chunk in chunks]
        return ForwardBatch(
            ForwardMode.EXTEND if is_extend else ForwardMode.DECODE,
            torch.cat([chunk.running.locs(0, chunk.start, chunk.end) for chunk in chunks]).to(device),
            torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
            torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=SINK).to(device),
            tuple(chunk.end - chunk.start for chunk in chunks),
        )

    def _run(self, chunks: list[PrefillChunk], locs: WriteLocs) -> WriteLocs:
        """Run the model on each chunk, write what it leaves where ``locs`` says; return the locations left over."""
        for chunk in chunks:
            count = chunk.end - chunk.start
            logits = self.pages.kept.run(chunk.running.past, chunk.tokens)
            self.pages.write(chunk.running.past, self._component_locs(locs.head(count), chunk))
            locs = locs.tail(count)
            chunk.running.note_computed(chunk)
            if not chunk.running.is_prefilling:
                self._emit(chunk.running, self._choose(logits))
        return locs

    def _component_locs(self, locs: WriteLocs, chunk: PrefillChunk | None) -> Sequence[torch.Tensor]:
        """Return by component where the tokens of a chunk go, or of padding.

        Full and what follows its slots go by the metadata, and so does what is mapped. Recurrent state has slots of its
        own, one for each page that keeps it, which no map stands before: the request's, or the sink.
        """
        found: list[torch.Tensor] = []
        for number, component in enumerate(self.pages.layout.components):
            if number == 0:
                found.append(locs.full)
            elif component.mapped and locs.swa is not None:
                found.append(locs.swa.to(torch.int64))
            elif chunk is not None:
                found.append(chunk.running.locs(number, chunk.start, chunk.end).to(locs.full.device))
            else:
                found.append(torch.full_like(locs.full, SINK))
        return found

    def _write_padding(self, locs: WriteLocs) -> None:
        """Write what the model makes of padding tokens; wherever that is, it had better be the sink."""
        for _ in range(len(locs.full)):
            self.pages.write(self._padding, self._component_locs(locs.head(1), None))
            locs = locs.tail(1)

    def _emit(self, running: RunningRequest, token: int) -> None:
        request = running.request
        request.tokens.append(token)
        if request.first_token_s is None:
            request.first_token_s = self._clock() - request.submitted_s
        if request.is_complete:
            request.outcome = RequestOutcome.FINISHED
            running.finish()
            self._running.remove(running)

    # ---- sizes -----------------------------------------------------------------------------------------------

    def _pages_needed(self, request: GenerationRequest) -> int:
        return -(-request.length_max // self.pages.layout.page_size)

    @property
    def _device_pages(self) -> int:
        return min(self.cache.config.device_pages)

    def _run_padding(self) -> DynamicCache:
        """Return what the model keeps of one padding token."""
        past = self.pages.kept.new_cache()
        self.pages.kept.run(past, [0])
        return past


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Capacity of each tier, and the retention of windows and states."""

    device_pages: int
    """Device pages of every component."""
    host_pages: int = 0
    """The same; 0 for no host tier, and then no storage."""
    retention: Retention = field(default_factory=Retention)


@contextmanager
def opened(
    name: str,
    kept: KeptState,
    sizes: TierSizes,
    storage: str | None = None,
    settings: EngineSettings = EngineSettings(),
    *,
    place: Callable[[SwaTranslation | None], WriteLocator] = PagedWriteLocator,
    choose: Callable[[torch.Tensor], int] = greedy,
) -> Iterator[BatchingEngine]:
    """Open an engine for the length of a ``with`` block, over the store that a URL names; it backs up what it inserts.

    ``place`` is given what translates Full locations, None where nothing does.

    Raises:
        ConfigError, StorageError: as ``open_storage`` and ``UnifiedCache.open``.
    """
    components = len(kept.layout.components)
    config = CacheConfig(
        device_pages=(sizes.device_pages,) * components,
        host_pages=(sizes.host_pages,) * components,
        retention=sizes.retention,
    )
    pages = kept.allocate(config.device_pages)
    with ExitStack() as doors:
        store = None if storage is None else open_storage(storage)
        if store is not None:
            doors.callback(store.close)
        cache = doors.enter_context(
            UnifiedCache.open(kept.layout, config, pages.pools, identity=Identity(name), storage=store)
        )
        paired = cache.pairing
        device = kept.model.device
        translation = None if paired is None else SwaTranslation.of(paired, cache.layout.page_size, device)
        engine = BatchingEngine(cache, pages, place(translation), settings, choose=choose)
        doors.callback(engine.close)
        yield engine


def main() -> None:
    """Serve three prompts with one beginning in one batch, then all of them again, from the pages of the first time."""
    torch.set_num_threads(1)  # how a sum is split among threads shows in its last bits
    system = b"You are the clerk of a small library of machines. Answer in one line. " * 3
    questions = (b"Where is the map of the harbour?", b"Who has drawn it?", b"May I take it home?")
    answers: list[list[int]] = []
    settings = EngineSettings(keeps_answers=False)
    kept = KeptState.of(tiny_model("tiny-gemma3"), TINY_MODELS["tiny-gemma3"].page_size)
    with opened("tiny-gemma3", kept, TierSizes(device_pages=96, host_pages=192), None, settings) as engine:
        for turn in ("first", "second"):
            requests = [GenerationRequest(list(system + question), tokens_max=16) for question in questions]
            assert all(map(engine.submit, requests))
            engine.run()
            reused, computed = (
                sum(each.reused.total for each in requests),
                sum(each.computed_tokens for each in requests),
            )
            print(f"{turn} time: {reused} tokens reused, {computed} computed")
            answers.append([token for request in requests for token in request.generated])
    assert answers[0] == answers[1], "a hit is never wrong bytes"


if __name__ == "__main__":
    main()
