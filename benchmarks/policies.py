"""Hits of adaptive eviction beside those of lru and of whoever knows the future, on ten kinds of made-up traffic.

    python -m benchmarks.policies [--requests N] [--seed N] [--seeds N] [--kind NAME] [--json FILE]

The tree alone, on a device of three sizes: parts of the different pages of the trace. Both trees serve the same
requests, batch by batch in turns, and the time is the processor's: ratios stand whatever else the machine does.
A whole run is kept in ``benchmarks/results/policies.json``.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.generated_traces import KINDS, REQUESTS, generated_trace
from benchmarks.machine import machine
from benchmarks.measure import quiet
from benchmarks.report import write_json
from unified_cache.components import Full
from unified_cache.controller.ledger import Ledger
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec, Tier
from unified_cache.sizing.replay.clairvoyant import FutureUses
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest
from unified_cache.sizing.replay.trace_pages import TracePages

__all__ = ["ComparedHits", "TreeEngine", "compared_hits"]

KEPT = Path(__file__).resolve().parent / "results" / "policies.json"
SHARES = (0.03, 0.1, 0.3)
"""Sizes of the device, in parts of the different pages of a trace."""
BATCH_REQUESTS = 50
LOST_MAX = 0.005
"""Part of lru's hits that adaptive eviction may lose."""


class TreeEngine:
    """A device of pages and an engine that computes what is missing, one request at a time; no bytes."""

    def __init__(self, pages: int, policy: EvictionPolicy) -> None:
        layout = ModelLayout(BLOCK_TOKENS, (Full((PoolSpec("kv", 8),)),))
        self.ledger = Ledger(layout, ((pages,), (0,)), EvictionConfig(device=(policy,)))
        self.hit_pages = 0

    def serve(self, prompt: Prompt) -> None:
        """Serve a request as ``UnifiedCache`` does."""
        tree = self.ledger.tree
        found = tree.match(prompt)
        request = tree.use(found, found.device_end)
        lock = tree.lock(found, found.device_end, Tier.DEVICE, request)
        self.hit_pages += lock.end
        new_pages = prompt.pages_count - lock.end
        if new_pages:
            slots = self.ledger.allocate_all(Tier.DEVICE, [(0, new_pages)])
            assert slots is not None, "only this request's own pages are pinned"
            self.ledger.insert(prompt, lock.end, slots, Tier.DEVICE, request=request)
            renewed = tree.lock(tree.match(prompt), prompt.pages_count, Tier.DEVICE, request)
            tree.unlock(lock)
            lock = renewed
        tree.unlock(lock)


@dataclass(frozen=True, slots=True)
class ComparedHits:
    """Hits of one trace on a device of one size, in pages."""

    kind: str
    device_pages: int
    asked: int
    lru: int
    adaptive: int
    clairvoyant: int
    time_ratio: float
    """Processor's time of adaptive over that of lru: the median of all batches."""

    @property
    def lost(self) -> float:
        """Part of lru's hits that adaptive has lost; negative where it has won."""
        return (self.lru - self.adaptive) / max(self.lru, 1)

    def __str__(self) -> str:
        ratios = (f"{hits / self.asked:8.4f}" for hits in (self.lru, self.adaptive, self.clairvoyant))
        lost = f"{self.lost:.2%}" if self.lru else ""
        return f"{self.kind:12} {self.device_pages:7,} {' '.join(ratios)} {lost:>9} {self.time_ratio:6.2f}"


def compared_hits(kind: str, requests: Sequence[TraceRequest], share: float) -> ComparedHits:
    """Serve a trace by both policies, on a device that holds that share of its different pages."""
    trace = TracePages.of(requests, BLOCK_TOKENS, padded=True)
    pages = int(trace.distinct_count * share)
    prompts = [Prompt.of(request.tokens(), BLOCK_TOKENS).head(pages) for request in requests]
    lru, adaptive = (TreeEngine(pages, policy) for policy in (EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE))
    ratios = [took_s[adaptive] / took_s[lru] for took_s in _batches(lru, adaptive, prompts)]
    return ComparedHits(
        kind=kind,
        device_pages=pages,
        asked=len(trace.numbers),
        lru=lru.hit_pages,
        adaptive=adaptive.hit_pages,
        clairvoyant=int(np.sum(FutureUses.of(trace.cut(pages)).ends(pages))),
        time_ratio=statistics.median(ratios),
    )


def _batches(lru: TreeEngine, adaptive: TreeEngine, prompts: Sequence[Prompt]) -> Iterator[dict[TreeEngine, float]]:
    """Have both serve the same requests in turns; yield the processor's seconds that a batch takes each."""
    with quiet():
        for number, start in enumerate(range(0, len(prompts), BATCH_REQUESTS)):
            took_s: dict[TreeEngine, float] = {}
            for engine in (lru, adaptive) if number % 2 else (adaptive, lru):
                began_s = time.thread_time()
                for prompt in prompts[start : start + BATCH_REQUESTS]:
                    engine.serve(prompt)
                took_s[engine] = time.thread_time() - began_s
            yield took_s


def main(
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of a trace.")] = REQUESTS,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the traces.")] = 0,
    seeds: Annotated[int, typer.Option(metavar="N", help="So many seeds, from that one on.")] = 1,
    kind: Annotated[list[str] | None, typer.Option(help=f"This alone: {', '.join(KINDS)}.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Keep the figures here.")] = None,
) -> None:
    """Hold adaptive eviction against lru; fails where it loses more than half a percent of lru's hits."""
    print(f"{'kind':12} {'pages':>7} {'lru':>8} {'adaptive':>8} {'best':>8} {'lost':>9} {'time':>6}")
    found: list[ComparedHits] = []
    for name in kind or KINDS:
        for each_seed in range(seed, seed + seeds):
            trace = generated_trace(name, requests, each_seed)
            for share in SHARES:
                found.append(compared_hits(name, trace, share))
                print(found[-1], flush=True)
    times = [each.time_ratio for each in found]
    worst = max(each.lost for each in found)
    beyond = sum(each.lost > LOST_MAX for each in found)
    print(
        f"lost at most {worst:.2%} of lru's hits, more than {LOST_MAX:.1%} in {beyond} of {len(found)}; "
        f"median time {statistics.median(times):.2f} of lru's"
    )
    path = json_file or (KEPT if kind is None and requests == REQUESTS and seed == 0 and seeds == 1 else None)
    if path is not None:
        traffic = {"requests": requests, "seed": seed, "seeds": seeds}
        write_json({"machine": asdict(machine()), **traffic, "hits": [asdict(each) for each in found]}, path)
    if worst > LOST_MAX:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
