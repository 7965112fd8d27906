"""A small continuous-batching engine over the prefix cache: the worked example of embedding it.

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
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import DynamicCache, PreTrainedModel

from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.errors import ConfigError, InputError, StateError
from unified_cache.forward import ForwardBatch, ForwardMode
from unified_cache.integrations.transformers import DevicePages, greedy
from unified_cache.sizing.demo.request import DemoRequest, RequestOutcome
from unified_cache.sizing.demo.running_request import SINK, PrefillChunk, RunningRequest
from unified_cache.sizing.demo.write_locator import WriteLocator, WriteLocs

__all__ = ["DemoEngine", "EngineSettings"]

POLL_S = 0.0005
"""Pause between two polls while nothing but transfers is in flight."""


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


class DemoEngine:
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
        self._queue: deque[DemoRequest] = deque()
        self._running: list[RunningRequest] = []
        self._padding = self._run_padding()

    # ---- requests --------------------------------------------------------------------------------------------

    def submit(self, request: DemoRequest) -> bool:
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

    def abort(self, request: DemoRequest) -> None:
        """Abort a request, queued or running; pages it has inserted stay cached. An ended request is left as it is."""
        if request.outcome is not None:
            return
        request.outcome = RequestOutcome.ABORTED
        if request in self._queue:
            self._queue.remove(request)
        for running in [running for running in self._running if running.request is request]:
            running.abort()
            self._running.remove(running)

    def stream(self, request: DemoRequest) -> Iterator[int]:
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
        """Return the Full locations that a forward writes and reads."""
        device = self._model.device
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
            logits = self._forward(chunk)
            self.pages.write(chunk.running.past, self._component_locs(locs.head(count), chunk))
            locs = locs.tail(count)
            chunk.running.note_computed(chunk)
            if not chunk.running.is_prefilling:
                self._emit(chunk.running, self._choose(logits))
        return locs

    @torch.no_grad()
    def _forward(self, chunk: PrefillChunk) -> torch.Tensor:
        """Run the model on one request's tokens; return what follows the last one, shape (vocabulary,)."""
        ids = torch.tensor([chunk.tokens], dtype=torch.int64, device=self._model.device)
        found = self._model(input_ids=ids, past_key_values=chunk.running.past, use_cache=True, logits_to_keep=1)
        return cast("torch.Tensor", found.logits[0, -1])

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

    def _pages_needed(self, request: DemoRequest) -> int:
        return -(-request.length_max // self.pages.layout.page_size)

    @property
    def _device_pages(self) -> int:
        return min(self.cache.config.device_pages)

    @property
    def _model(self) -> PreTrainedModel:
        return self.pages.kept.model

    @torch.no_grad()
    def _run_padding(self) -> DynamicCache:
        """Return what the model keeps of one padding token."""
        past = self.pages.new_cache()
        self._model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=self._model.device), past_key_values=past)
        return past
