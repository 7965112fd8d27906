"""One engine of a replay: a cache, the engine that computes its pages, and the counts of the requests served."""

from collections import Counter
from types import TracebackType
from typing import Self

import numpy as np

from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, NotStarted, Operation, TransferKind
from unified_cache.controller.memory import PageMemory
from unified_cache.core.config import WritePolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Hits, Identity
from unified_cache.core.window import window
from unified_cache.sizing.replay.engine import OracleEngine
from unified_cache.sizing.replay.missed import MissedTokens, missed_tokens
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.trace import TraceRequest
from unified_cache.storage_backends.protocol import Store
from unified_cache.tree import Lock

SETTLE_TIMEOUT_S = 600.0
"""Longest wait for the transfers of one request: gigabytes on a slow disk, and still an end."""


class Player:
    """A cache, the engine over it, and the counts so far. Use it in a ``with`` block."""

    def __init__(self, plan: ReplayPlan, cache: UnifiedCache, engine: OracleEngine | None) -> None:
        """Take parts that fit each other; ``Player.open`` puts them together.

        Without an engine nothing is computed and compared: there are no bytes.
        """
        self.plan = plan
        self.cache = cache
        self._engine = engine
        self._pending: Operation | NotStarted | None = None
        self._backs_up_itself = plan.config.write is WritePolicy.ON_CALL
        self.missed: MissedTokens | None = Counter() if plan.explains else None
        """Missed tokens by reason."""
        self.wrong_pages = 0
        self.pages_verified = 0
        self.component_hits = [Hits() for _ in plan.layout.components]
        """Hit pages of each component, by the tier that they came from."""

    @classmethod
    def open(cls, plan: ReplayPlan, storage: Store | None) -> Self:
        """Allocate the tiers of one engine over a store, which the player closes."""
        layout, config = plan.layout, plan.config
        subject = "unified-cache replay" if plan.model is None else f"unified-cache replay of {plan.model}"
        identity = Identity(subject, dtype="uint8")
        if not plan.with_bytes:
            cache = UnifiedCache.assemble(layout, config, PageMemory(), InlineWorkers(), identity, storage)
            return cls(plan, cache, None)
        engine = OracleEngine.allocate(layout, config.device_pages)
        cache = UnifiedCache.open(layout, config, engine.pools, identity=identity, storage=storage)
        return cls(plan, cache, engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cache.close()

    def serve(self, traced: TraceRequest) -> Hits:
        """Serve one request; return the pages handed back, by the tier they came from.

        The backup that it ends with settles before the next request, or in ``wait_all``. A request longer than the
        device pool is served and kept as far as it fits.
        """
        cache = self.cache
        prompt = self._prompt(traced)
        if self._engine is not None:
            _ = prompt.keys  # digested while the last request's pages are still on their way to storage
        self.wait_all()
        before = self._moved()
        request = cache.bring(prompt)
        with request:
            self._check(request.wait(SETTLE_TIMEOUT_S))
            locked_end = request.lock.end
            if self.missed is not None:
                self.missed += missed_tokens(
                    prompt,
                    traced.input_length,
                    locked_end,
                    cache.explain(prompt, seeks_near=False),
                    full=self.plan.layout.components[0].name,
                    is_cut=prompt.pages_count < self.plan.pages_of(traced),
                )
            self._count(request.lock, prompt, before)
            # [0, locked_end)            handed back: pinned on the device, and now compared with the oracle
            # [locked_end, pages_count)  computed here, then handed to the cache
            if locked_end < prompt.pages_count:
                slots = request.allocate()
                assert slots is not None, "nothing but this request's own pages is pinned"
                if self._engine is not None:
                    for component, given in enumerate(slots):
                        computed = np.flatnonzero(given >= 0)
                        keys = [prompt.keys[locked_end + page] for page in computed.tolist()]
                        self._engine.compute(component, keys, given[computed])
                request.insert()
            if self.plan.has_host and self._backs_up_itself:
                self._pending = cache.backup(prompt)
        return request.hits

    def _prompt(self, request: TraceRequest) -> Prompt:
        """Return a request's prompt, as far as the device can hold it.

        It is whole: a trace names the blocks of a request, and no token after them.
        """
        tokens = request.tokens()
        if not self.plan.padded:
            tokens = tokens[: request.input_length]
        return self.cache.prompt(tokens, whole=True).head(self.plan.config.device_pages[0])

    def _moved(self) -> tuple[list[int], ...]:
        """Return by component the pages that have come from storage, and to the device, so far."""
        traffic = self.cache.traffic()
        return traffic[TransferKind.PREFETCH].component_pages, traffic[TransferKind.LOAD].component_pages

    def _count(self, lock: Lock, prompt: Prompt, before: tuple[list[int], ...]) -> None:
        """Book what a lock hands back of each component, and compare it with the oracle.

        ``before`` is what had moved when the request came.
        """
        now = self._moved()
        for number, component in enumerate(self.plan.layout.components):
            start = window(lock.end, component.span)
            count = lock.end - start
            storage, loaded = (after[number] - then[number] for after, then in zip(now, before, strict=True))
            loaded = min(loaded, count)
            storage = min(storage, loaded)
            self.component_hits[number] += Hits(count - loaded, loaded - storage, storage)
            if count and self._engine is not None:
                slots = self.cache.slots(lock, number)
                self.wrong_pages += self._engine.count_wrong(number, prompt.keys[start : lock.end], slots)
                self.pages_verified += count

    def wait_all(self) -> None:
        """Wait until every transfer is over."""
        if self._pending is not None or not self._backs_up_itself:
            self._check(self.cache.wait_all(SETTLE_TIMEOUT_S))

    def _check(self, ended: list[Operation]) -> None:
        """Raise the error of a transfer that failed, the backup of the last request among them."""
        for operation in (self._pending, *ended):
            if operation and operation.error is not None:
                raise operation.error
        self._pending = None
