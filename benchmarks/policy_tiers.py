"""Hits and bytes moved of adaptive eviction beside those of lru, over device, host and storage together.

    python -m benchmarks.policy_tiers [--kind NAME] [--requests N] [--seed N] [--json FILE]

A replay of the conversation trace and of ten kinds of made-up traffic, under each policy on device and host; the store
goes by its own lru. The tiers hold 3, 10 and 30 percent of the different pages of a trace. No bytes move: those that
would have are counted. What ran takes the place of its kinds in ``benchmarks/results/policy_tiers.json``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.generated_traces import KINDS, generated_trace
from benchmarks.machine import machine
from benchmarks.report import keep_rows
from unified_cache.config import EvictionPolicy
from unified_cache.replay.policies import ReplayPolicies
from unified_cache.replay.runner import replay
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.trace import BLOCK_TOKENS, TraceRequest, iterate_trace
from unified_cache.replay.trace_pages import TracePages
from unified_cache.seal import HEADER_BYTES

__all__ = ["TieredRun", "tiered_runs"]

ROOT = Path(__file__).resolve().parent
TRACE = ROOT.parent / "traces" / "mooncake_conversation.jsonl.gz"
KEPT = ROOT / "results" / "policy_tiers.json"
CONVERSATION = "conversation"
REQUESTS = 4_000
SHARES = (0.03, 0.1, 0.3)
"""Sizes of device, host and storage, in parts of the different pages of a trace."""
PAGE_BYTES = 4_096
LOST_MAX = 0.005
"""Part of lru's hits that adaptive eviction may lose."""


@dataclass(frozen=True, slots=True)
class TieredRun:
    """Hits of one trace under one policy, and what would have moved."""

    kind: str
    policy: str
    requests: int
    asked_pages: int
    hit_pages: dict[str, int]
    """By tier."""
    moved_pages: dict[str, int]
    """By kind of transfer."""

    @property
    def hits(self) -> int:
        """Pages handed back from anywhere."""
        return sum(self.hit_pages.values())

    @property
    def moved(self) -> int:
        """Pages moved between tiers, in either direction."""
        return sum(self.moved_pages.values())


def tiered_runs(kind: str, requests: Sequence[TraceRequest]) -> tuple[TieredRun, TieredRun]:
    """Serve a trace under lru and under adaptive eviction."""
    distinct = TracePages.of(requests, BLOCK_TOKENS, padded=True).distinct_count
    device, host, stored = (max(int(distinct * share), 1) for share in SHARES)
    return (
        _run(kind, requests, (device, host, stored), EvictionPolicy.LRU),
        _run(kind, requests, (device, host, stored), EvictionPolicy.ADAPTIVE),
    )


def _run(kind: str, requests: Sequence[TraceRequest], pages: tuple[int, int, int], policy: EvictionPolicy) -> TieredRun:
    device, host, stored = pages
    settings = ReplaySettings(
        device_pages=device,
        host_pages=host,
        storage="memory:",
        storage_bytes=stored * (PAGE_BYTES + HEADER_BYTES),
        page_bytes=PAGE_BYTES,
        with_bytes=False,
        policies=ReplayPolicies(device=policy, host=policy),
    )
    result = replay(kind, requests, settings, lambda _done, _ratio: None)
    moved = {name: count // PAGE_BYTES for name, count in result.bytes_moved.items()}
    return TieredRun(kind, policy.value, len(requests), result.pages, result.hits.by_tier(), moved)


def _line(lru: TieredRun, adaptive: TieredRun) -> str:
    ratios = " ".join(f"{run.hits / run.asked_pages:8.4f}" for run in (lru, adaptive))
    lost = f"{(lru.hits - adaptive.hits) / lru.hits:.2%}" if lru.hits else ""
    kinds = (f"{name} {adaptive.moved_pages[name] - pages:+,}" for name, pages in lru.moved_pages.items())
    return f"{lru.kind:12} {ratios} {lost:>8} {adaptive.moved / max(lru.moved, 1):6.3f}  {', '.join(kinds)}"


def main(
    kind: Annotated[list[str] | None, typer.Option(help=f"This alone: {CONVERSATION}, {', '.join(KINDS)}.")] = None,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of a trace.")] = REQUESTS,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the made-up traces.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Keep the figures here.")] = None,
) -> None:
    """Hold adaptive eviction against lru in three tiers; fails where it loses more than half a percent of hits."""
    print(f"{'kind':12} {'lru':>8} {'adaptive':>8} {'lost':>8} {'moved':>6}  pages moved more, by kind of transfer")
    worst = 0.0
    for name in kind or (CONVERSATION, *KINDS):
        made = name != CONVERSATION
        trace = generated_trace(name, requests, seed) if made else list(islice(iterate_trace(TRACE), requests))
        lru, adaptive = tiered_runs(name, trace)
        worst = max(worst, (lru.hits - adaptive.hits) / max(lru.hits, 1))
        print(_line(lru, adaptive), flush=True)
        if json_file is not None or (requests == REQUESTS and seed == 0):
            rows = [{**asdict(run), "commit": machine().commit} for run in (lru, adaptive)]
            keep_rows(rows, json_file or KEPT, ("kind", "policy"))
    if worst > LOST_MAX:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
