"""Example 6: an engine over KV pages of its own, in numpy: several requests at once, chunked prefill, abort, restart.

Its "model" has a layer of full attention and one of a sliding window. A token's state is a number made of the token and
of the state before it, read from the pages: one wrong byte of a hit changes every token after it.

python examples/paged_engine.py
"""
# ruff: noqa: T201 - an example prints to standard output

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import numpy as np

from unified_cache import CacheConfig, DevicePool, Full, ModelLayout, PoolSpec, Request, SlidingWindow, UnifiedCache
from unified_cache.core.extras import needs_extra

with needs_extra("engine", "this example"):
    import torch

PAGE, WINDOW, CHUNK = 4, 8, 3  # tokens of a page, tokens that the window layer sees, pages of a prompt in one step
KV, SWA = PoolSpec("kv", page_bytes=PAGE * 8), PoolSpec("swa_kv", page_bytes=PAGE * 8)
LAYOUT = ModelLayout(PAGE, (Full((KV,)), SlidingWindow(WINDOW, PAGE, (SWA,))))
CONFIG = CacheConfig(device_pages=(32, 32), host_pages=(64, 64))


def state(token: int, full: Sequence[int], window: Sequence[int]) -> tuple[int, int]:
    """Return what both layers keep of a token, given what they keep of all tokens before it, and of the last few."""
    mixed = (token * 31 + sum(full) * 17 + 7) % (1 << 31)
    return mixed, (mixed * 13 + sum(window) * 5 + 3) % (1 << 31)


def states(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return what each layer must keep of each token, computed without a cache: what a hit is compared with."""
    full: list[int] = []
    window: list[int] = []
    for token in tokens:
        for kept, value in zip((full, window), state(token, full, window[-WINDOW + 1 :]), strict=True):
            kept.append(value)
    return full, window


@dataclass(eq=False)
class PagedRequest:
    """One prompt and its answer. ``tokens[:done]`` have state in pages."""

    tokens: list[int]
    prompt_length: int
    length_max: int
    done: int = 0
    request: Request | None = None
    """What the cache holds for it; None before it is admitted and after it is over."""

    @property
    def pages_max(self) -> int:
        """Pages that it comes to."""
        return -(-self.length_max // PAGE)


class PagedEngine:
    """Serves jobs in steps: in each, a chunk of every prompt or a token of every answer."""

    def __init__(self, storage: str) -> None:
        """Make the pages, slot 0 for padding, and the cache that moves them between the tiers."""
        self.pages = [np.zeros((count + 1, PAGE), np.int64) for count in CONFIG.device_pages]
        pools = [DevicePool(pool, [torch.from_numpy(pages)]) for pool, pages in zip((KV, SWA), self.pages, strict=True)]
        self.cache = UnifiedCache.open(LAYOUT, CONFIG, pools, identity="toy", storage=storage)
        self.waiting: list[PagedRequest] = []
        self.running: list[PagedRequest] = []

    def submit(self, tokens: Sequence[int], answer_tokens: int) -> PagedRequest:
        """Take a prompt; ``tokens`` of what it returns grow by the answer while the engine steps."""
        self.waiting.append(PagedRequest(list(tokens), len(tokens), len(tokens) + answer_tokens))
        return self.waiting[-1]

    def abort(self, job: PagedRequest) -> None:
        """End a job at any step: its own pages are free at once, and what it inserted stays cached."""
        for jobs in (self.waiting, self.running):
            if job in jobs:
                jobs.remove(job)
        if job.request is not None:
            job.request.close()
            job.request = None

    def run(self) -> None:
        """Step until no job is left."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Let transfers go on, admit what fits on the device to its end, and move every running job on."""
        self.cache.poll()
        while self.waiting and sum(job.pages_max for job in [*self.running, self.waiting[0]]) <= CONFIG.device_pages[0]:
            job = self.waiting.pop(0)
            job.request = self.cache.bring(self.cache.prompt(job.tokens))  # others run while it comes
            self.running.append(job)
        for job in list(self.running):
            assert job.request is not None
            if job.request.advance():  # the prefix is pinned; False while it comes
                self._go_on(job, job.request)
            if len(job.tokens) == job.length_max:
                job.request.insert(self.cache.prompt(job.tokens[: job.done]))  # the next turn goes on from the answer
                self.abort(job)

    def _go_on(self, job: PagedRequest, request: Request) -> None:
        if not job.done and request.lock.end:
            self._check_hit(job, request)
            job.done = request.lock.end * PAGE
        end = min(len(job.tokens), (job.done // PAGE + CHUNK) * PAGE)
        if (pages := -(-end // PAGE)) > request.own_end:
            # Pages under way need a slot in every layer; ``trim`` frees those that have left the window, but for the
            # ends at which a later request may resume.
            request.trim(request.own_end)
            if request.allocate(pages, range(request.own_end + 1, pages + 1)) is None:
                return  # what is being backed up still holds pages: the next step tries again
        for index in range(job.done, end):
            self._compute(job, request, index)
        job.done = end
        if end == len(job.tokens):
            if end == job.prompt_length:
                request.insert()  # the whole pages of the prompt: others hit them from now on
            job.tokens.append(self._table(request, 1)[1][end - 1] % 1000)

    def _table(self, request: Request, component: int) -> tuple[list[int], dict[int, int]]:
        """Return the slots of a component by page, from its first page on that has one, and its state by token."""
        held = np.concatenate((request.slots(component), request.own[component]))
        first = request.own_end - len(held)
        kept = {
            (first + page) * PAGE + offset: int(value)
            for page, slot in enumerate(held.tolist())
            if slot >= 0
            for offset, value in enumerate(self.pages[component][slot])
        }
        return held.tolist(), kept

    def _compute(self, job: PagedRequest, request: Request, index: int) -> None:
        """Run the model on one token: read the state before it from the pages, write its own there."""
        (_, full), (_, window) = (self._table(request, component) for component in (0, 1))
        seen = [full[before] for before in range(index)]
        near = [window[before] for before in range(max(0, index - WINDOW + 1), index)]
        for component, value in enumerate(state(job.tokens[index], seen, near)):
            held, _ = self._table(request, component)
            self.pages[component][held[index // PAGE - request.own_end], index % PAGE] = value

    def _check_hit(self, job: PagedRequest, request: Request) -> None:
        """Compare every byte of a hit with what computing gives. A real engine trusts the cache."""
        end = request.lock.end * PAGE
        for component, expected in enumerate(states(job.tokens[:end])):
            _, kept = self._table(request, component)
            assert all(kept[index] == expected[index] for index in kept), "a hit is never wrong"


def main() -> None:
    """Answer a conversation beside two other prompts, continue it, restart, and continue it again."""
    with TemporaryDirectory() as directory:
        engine = PagedEngine(f"file:{directory}")
        first = engine.submit(range(40), answer_tokens=6)
        for start in (100, 200):
            engine.submit(range(start, start + 30), answer_tokens=3)
        engine.run()
        print(f"answer: {first.tokens[40:]}")
        for turn in ("next turn", "after a restart"):
            with engine.cache.bring(engine.cache.prompt([*first.tokens, 1, 2, 3])) as request:
                request.wait(timeout_s=10)
                print(f"{turn}: {request.hits}")
            engine.cache.close()
            engine = PagedEngine(f"file:{directory}")
        engine.cache.close()


if __name__ == "__main__":
    main()
