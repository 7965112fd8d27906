"""Ten kinds of traffic, made up with fixed seeds: prompts as numbers of blocks, equal ones after equal prefixes.

Each is there for one way in which an order of eviction can go wrong: by reading structure into noise, by being slow to
forget, by keeping what comes too late, or by giving up what many share.
"""

import random
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest

__all__ = ["KINDS", "REQUESTS", "generated_trace"]

REQUESTS = 6_000
"""Requests of a whole trace."""

AGENTS = 100
"""Agents that are at work at a time, in that kind of traffic."""

Blocks = tuple[int, ...]


class TrafficSource:
    """Random choices of one trace, and blocks that no prompt had before."""

    def __init__(self, name: str, requests: int) -> None:
        self.random = random.Random(name)
        self.requests = requests
        """Requests that will be taken of the trace."""
        self._next_block = 0

    def new(self, least: int, most: int | None = None) -> Blocks:
        """Return new blocks: as many as ``least``, or up to ``most``."""
        count = self.random.randint(least, most or least)
        self._next_block += count
        return tuple(range(self._next_block - count, self._next_block))

    def popular(self, things: list[Blocks], skew: float) -> Iterator[Blocks]:
        """Yield things for ever, the first most often: the n-th with weight 1 / n ** skew."""
        weights = [1 / (rank + 1) ** skew for rank in range(len(things))]
        while True:
            yield from self.random.choices(things, weights, k=64)


def uniform(source: TrafficSource) -> Iterator[Blocks]:
    """Documents that are all asked for equally often: no order is better than another."""
    documents = [source.new(4, 20) for _ in range(600)]
    while True:
        yield source.random.choice(documents)


def zipf(source: TrafficSource) -> Iterator[Blocks]:
    """Documents of which few are popular, each with a new question."""
    documents = [source.new(2, 30) for _ in range(1_500)]
    for document in source.popular(documents, 1):
        yield document + source.new(1, 2)


def scans(source: TrafficSource) -> Iterator[Blocks]:
    """Documents with questions, and between them runs of long prompts that never come back."""
    documents = [source.new(8) for _ in range(60)]
    while True:
        for _ in range(40):
            yield source.random.choice(documents) + source.new(1)
        for _ in range(40):
            yield source.new(12)


def loops(source: TrafficSource) -> Iterator[Blocks]:
    """Documents in turn, more than fit: lru hits nothing."""
    documents = [source.new(10) for _ in range(350)]
    while True:
        yield from documents


def sessions(source: TrafficSource, goes_on: Callable[[int, int], float], pause: float) -> Iterator[Blocks]:
    """Sessions; ``goes_on(request, blocks)`` is the chance of another turn, after about ``pause`` requests.

    A turn keeps all but the last block of what was before, which it fills up.
    """
    rnd = source.random
    waiting: list[tuple[float, int, Blocks]] = []
    number = 0
    while True:
        number += 1
        prompt = source.new(rnd.choice((2, 4, 8, 30)))
        if waiting and waiting[0][0] <= number:
            prompt = heappop(waiting)[2][:-1] + source.new(1, 4)
        if rnd.random() < goes_on(number, len(prompt)):
            heappush(waiting, (number + 1 + rnd.expovariate(1 / pause), number, prompt))
        yield prompt


def flips(source: TrafficSource) -> Iterator[Blocks]:
    """Sessions that go on when they are short, and, from half-way on, when they are long."""

    def goes_on(request: int, blocks: int) -> float:
        return 0.7 if (blocks > 8) == (2 * request > source.requests) else 0.2

    return sessions(source, goes_on, 60)


def retrieval(source: TrafficSource) -> Iterator[Blocks]:
    """One system prompt, one or two documents of a base, and a question."""
    system = source.new(2)
    documents = source.popular([source.new(3) for _ in range(400)], 0.7)
    for first in documents:
        rest = next(documents) if source.random.random() < 0.2 else ()
        yield system + first + rest + source.new(2)


def agents(source: TrafficSource) -> Iterator[Blocks]:
    """Agents, a hundred at a time, below five prompts of tools; each conversation grows by every call's result.

    Most calls return soon and some late. Whichever agent has ended makes room for a new one.
    """
    rnd = source.random
    tools = source.popular([source.new(4, 12) for _ in range(5)], 1)
    calls = [(rnd.random(), agent, next(tools) + source.new(2, 6)) for agent in range(AGENTS)]
    heapify(calls)
    while True:
        now, agent, prompt = calls[0]
        yield prompt
        goes_on = rnd.random() < 0.94
        heapreplace(
            calls,
            (
                now + rnd.lognormvariate(0, 1.5),
                agent,
                prompt[:-1] + source.new(2, 5) if goes_on else next(tools) + source.new(2, 6),
            ),
        )


def tenants(source: TrafficSource) -> Iterator[Blocks]:
    """Sessions below the system prompts of sixty tenants, few of whom have most of the traffic."""
    systems = source.popular([source.new(6) for _ in range(60)], 1)
    begun: dict[int, Blocks] = {}
    for prompt in sessions(source, lambda _request, _blocks: 0.4, 40):
        yield begun.setdefault(prompt[0], next(systems)) + prompt


def giant(source: TrafficSource) -> Iterator[Blocks]:
    """Sessions, and now and then one prompt as large as a cache."""
    document = source.new(900)
    for number, prompt in enumerate(sessions(source, lambda _request, _blocks: 0.5, 50)):
        yield document + source.new(1) if number % 97 == 50 else prompt


def adversarial(source: TrafficSource) -> Iterator[Blocks]:
    """Habits that are turned around every 700 requests, about as soon as they can be learned."""
    rnd = source.random
    recent: list[Blocks] = []
    number = 0
    while True:
        is_late = number // 700 % 2 == 1
        prompt = source.new(3 if is_late else 14)
        if len(recent) > 120 and rnd.random() < 0.5:
            before = recent[-100] if is_late else recent[-rnd.randint(1, 20)]
            prompt = before[:-1] + source.new(2 if is_late else 9)
        recent.append(prompt)
        del recent[:-130]
        number += 1
        yield prompt


KINDS: dict[str, Callable[[TrafficSource], Iterator[Blocks]]] = {
    kind.__name__: kind for kind in (uniform, zipf, scans, loops, flips, retrieval, agents, tenants, giant, adversarial)
}
"""Kinds of traffic by name."""


def generated_trace(kind: str, requests: int = REQUESTS, seed: int = 0) -> list[TraceRequest]:
    """Make the trace of that kind; the same for the same arguments, on every machine."""
    source = TrafficSource(f"{kind} {seed}", requests)
    prompts = islice(KINDS[kind](source), requests)
    return [
        TraceRequest(300.0 * number, len(blocks) * BLOCK_TOKENS, 100, blocks) for number, blocks in enumerate(prompts)
    ]
