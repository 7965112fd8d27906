"""Hits and bytes moved of adaptive eviction beside those of lru, over device, host and storage together.

    python -m benchmarks.policy_tiers [--model NAME] [--kind NAME] [--write POLICY] [--requests N]
        [--seed N] [--json FILE]

A replay of the conversation trace and of ten kinds of made-up traffic, under each policy on device and host; the store
goes by its own lru. Full attention alone first, in pages of 512 tokens: the tiers hold 3, 10 and 30 percent of the
different pages of a trace. Then four models with windows or states, in pages of 256 tokens, on some of the traces: the
tiers have 3, 10 and 30 percent of the bytes that typical prompts of as many different tokens take, split between
components as a replay of a model splits them. No bytes move: those that would have are counted. What ran takes the
place of its models and kinds in ``benchmarks/results/policy_tiers.json``.
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
from benchmarks.window_bytes import MODELS, PAGE_TOKENS
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import EvictionPolicy, Retention, WritePolicy
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.tier_sizes import PROMPT_TOKENS, SizedTiers, prompt_bytes
from unified_cache.sizing.replay.plan import ReplayPolicies
from unified_cache.sizing.replay.runner import replay
from unified_cache.sizing.replay.settings import ModelSettings, PlannedSettings, ReplaySettings
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest, iterate_trace
from unified_cache.sizing.replay.trace_pages import TracePages

__all__ = ["TieredRun", "tiered_runs"]

ROOT = Path(__file__).resolve().parent
TRACE = ROOT.parent / "traces" / "mooncake_conversation.jsonl.gz"
KEPT = ROOT / "results" / "policy_tiers.json"
CONVERSATION = "conversation"
FULL_ALONE = "full attention"
REQUESTS = 4_000
SHARES = (0.03, 0.1, 0.3)
"""Sizes of device, host and storage, in parts of the different pages of a trace."""
PAGE_BYTES = 4_096
"""Bytes of a page of full attention alone."""
LOST_MAX = 0.005
"""Part of lru's hits that adaptive eviction may lose."""
MODEL_KINDS = (CONVERSATION, "zipf", "retrieval")
"""Traces that models are compared on, where no others are named."""


@dataclass(frozen=True, slots=True)
class TieredRun:
    """Hits of one trace under one policy, and what would have moved."""

    model: str
    kind: str
    policy: str
    write: str
    """Write policy; on call, every prompt is backed up when it was served."""
    requests: int
    asked_pages: int
    hit_pages: dict[str, int]
    """By tier."""
    moved_bytes: dict[str, int]
    """By kind of transfer."""

    @property
    def hits(self) -> int:
        """Pages handed back from anywhere."""
        return sum(self.hit_pages.values())

    @property
    def moved(self) -> int:
        """Bytes moved between tiers, in either direction."""
        return sum(self.moved_bytes.values())


def tiered_runs(
    kind: str, requests: Sequence[TraceRequest], model: str = FULL_ALONE, write: WritePolicy = WritePolicy.ON_CALL
) -> tuple[TieredRun, TieredRun]:
    """Serve a trace under lru and under adaptive eviction."""
    lru, adaptive = (
        _run(kind, requests, model, ReplayPolicies(device=policy, host=policy, write=write))
        for policy in (EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE)
    )
    return lru, adaptive


def _run(kind: str, requests: Sequence[TraceRequest], model: str, policies: ReplayPolicies) -> TieredRun:
    blocks = TracePages.of(requests, BLOCK_TOKENS, padded=True).distinct_count
    settings = _full_alone(blocks, policies) if model == FULL_ALONE else _whole_model(model, blocks, policies)
    result = replay(kind, requests, settings)
    hits = result.hits.by_tier()
    return TieredRun(
        model, kind, policies.device.value, policies.write.value, len(requests), result.pages, hits, result.bytes_moved
    )


def _full_alone(blocks: int, policies: ReplayPolicies) -> PlannedSettings:
    device, host, stored = (max(int(blocks * share), 1) for share in SHARES)
    return ReplaySettings(
        device_pages=device,
        host_pages=host,
        storage="memory:",
        storage_bytes=stored * (PAGE_BYTES + HEADER_BYTES),
        page_bytes=PAGE_BYTES,
        with_bytes=False,
        policies=policies,
    )


def _whole_model(model: str, blocks: int, policies: ReplayPolicies) -> PlannedSettings:
    sized, kept = size_preset(model, page_size=PAGE_TOKENS), Retention()
    typical = SizedTiers.of(sized.layout, kept, sized.window_tokens, model).typical_pages
    all_bytes = prompt_bytes(sized.layout, typical, sealed=True) * blocks * BLOCK_TOKENS / PROMPT_TOKENS
    device, host, stored = (int(all_bytes * share) for share in SHARES)
    return ModelSettings(
        model,
        sized,
        kept,
        device_bytes=device,
        host_bytes=host,
        storage_bytes=stored,
        with_bytes=False,
        policies=policies,
    )


def _line(lru: TieredRun, adaptive: TieredRun) -> str:
    ratios = " ".join(f"{run.hits / run.asked_pages:8.4f}" for run in (lru, adaptive))
    lost = f"{(lru.hits - adaptive.hits) / lru.hits:.2%}" if lru.hits else ""
    moved = adaptive.moved / max(lru.moved, 1)
    more = (f"{name} {adaptive.moved_bytes[name] - was:+,}" for name, was in lru.moved_bytes.items())
    return f"{lru.model:17} {lru.kind:12} {ratios} {lost:>8} {moved:6.3f}  {', '.join(more)}"


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"This alone: {FULL_ALONE}, {', '.join(MODELS)}.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"This alone: {CONVERSATION}, {', '.join(KINDS)}.")] = None,
    write: Annotated[WritePolicy, typer.Option(help="Time of the backups.")] = WritePolicy.ON_CALL,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of a trace.")] = REQUESTS,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the made-up traces.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Keep the figures here.")] = None,
) -> None:
    """Hold adaptive eviction against lru in three tiers; fails where it loses more than half a percent of hits."""
    heads = f"{'lru':>8} {'adaptive':>8} {'lost':>8} {'moved':>6}"
    print(f"{'model':17} {'kind':12} {heads}  bytes moved more, by kind of transfer")
    worst = 0.0
    for compared in model or (FULL_ALONE, *MODELS):
        for name in kind or ((CONVERSATION, *KINDS) if compared == FULL_ALONE else MODEL_KINDS):
            made = name != CONVERSATION
            trace = generated_trace(name, requests, seed) if made else list(islice(iterate_trace(TRACE), requests))
            lru, adaptive = tiered_runs(name, trace, compared, write)
            worst = max(worst, (lru.hits - adaptive.hits) / max(lru.hits, 1))
            print(_line(lru, adaptive), flush=True)
            if json_file is not None or (requests == REQUESTS and seed == 0):
                rows = [{**asdict(run), "commit": machine().commit} for run in (lru, adaptive)]
                keep_rows(rows, json_file or KEPT, ("model", "kind", "policy", "write"))
    if worst > LOST_MAX:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
