"""Window bytes that adaptive eviction needs for the hits of the best fixed rule, of four models on two devices.

    python -m benchmarks.window_bytes [--model NAME] [--device-gib N] [--requests N]

The conversation trace, pages of 256 tokens, a device alone. A fixed rule keeps windows and states at prompts' ends and
at branches, with or without a tail of 512 tokens, under lru; the device is split between components as a replay
splits it. Under adaptive eviction, of the better rule's windows 60 percent are there, and as much of Full. What ran
takes the place of its models in ``benchmarks/results/window_bytes.json``.
"""

from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import machine
from benchmarks.report import keep_rows
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import EvictionPolicy, Retention
from unified_cache.sizing.replay.plan import ReplayPlan, ReplayPolicies, component_bytes
from unified_cache.sizing.replay.runner import served_hits
from unified_cache.sizing.replay.settings import ModelSettings
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest, iterate_trace

ROOT = Path(__file__).resolve().parent
TRACE = ROOT.parent / "traces" / "mooncake_conversation.jsonl.gz"
KEPT = ROOT / "results" / "window_bytes.json"
MODELS = ("deepseek-v4-flash", "gpt-oss-120b", "gemma-3-27b", "qwen3-next")
DEVICES_GIB = (24, 256)
REQUESTS = 6_000
PAGE_TOKENS = 256
RULES = {"end, branches": Retention(), "end, branches, tail": Retention(tail_tokens=BLOCK_TOKENS)}
SHARE = 0.6
"""Part of the best fixed rule's windows that adaptive eviction is given."""


@dataclass(frozen=True, slots=True)
class ComparedWindows:
    """Token hit ratios of one model on one device."""

    model: str
    device_gib: int
    requests: int
    rules: dict[str, float]
    """Of each fixed rule, under lru."""
    window_bytes: int
    """Of windows and states, under the best of them."""
    adaptive: float
    adaptive_window_bytes: int

    @property
    def of_best(self) -> float:
        """Hits of adaptive eviction, of those of the best fixed rule."""
        return self.adaptive / max(self.rules.values())

    def __str__(self) -> str:
        rules = ", ".join(f"{rule} {ratio:.4f}" for rule, ratio in self.rules.items())
        return (
            f"{self.model} {self.device_gib} GiB: {rules}; adaptive {self.adaptive:.4f}, {self.of_best:.1%} of the best"
        )


def compared(model: str, device_gib: int, requests: list[TraceRequest]) -> ComparedWindows:
    """Return the hits of each fixed rule, and those of adaptive eviction with fewer windows than the best of these."""
    sized = size_preset(model, page_size=PAGE_TOKENS)
    plans = {
        rule: ModelSettings(
            model, sized, kept, device_gib << 30, 0, storage=None, storage_bytes=None, with_bytes=False
        ).plan
        for rule, kept in RULES.items()
    }
    ratios = {rule: token_ratio(plan, requests) for rule, plan in plans.items()}
    best = plans[max(ratios, key=lambda rule: ratios[rule])]
    full, *windows = best.device_pages
    fewer = (full, *(int(pages * SHARE) for pages in windows))
    adaptive = replace(best, device_pages=fewer, policies=ReplayPolicies(device=EvictionPolicy.ADAPTIVE))
    hits = token_ratio(adaptive, requests)
    return ComparedWindows(model, device_gib, len(requests), ratios, _window_bytes(best), hits, _window_bytes(adaptive))


def token_ratio(plan: ReplayPlan, requests: list[TraceRequest]) -> float:
    """Replay requests; return the part of their tokens that was found."""
    served = zip(served_hits(plan, requests), requests, strict=True)
    found = sum(hits.tokens(plan.layout.page_size, request.input_length).total for hits, request in served)
    return found / sum(request.input_length for request in requests)


def _window_bytes(plan: ReplayPlan) -> int:
    sizes = zip(plan.true_layout.components, plan.device_pages, strict=True)
    return sum(component_bytes(component) * pages for component, pages in list(sizes)[1:])


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"This alone: {', '.join(MODELS)}.")] = None,
    device_gib: Annotated[list[int] | None, typer.Option(metavar="N", help="Device of this size alone.")] = None,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of the trace, from its beginning.")] = REQUESTS,
) -> None:
    """Print and keep a row for each model and size."""
    trace = list(islice(iterate_trace(TRACE), requests))
    for name in model or MODELS:
        for gib in device_gib or DEVICES_GIB:
            found = compared(name, gib, trace)
            print(found, flush=True)
            if requests == REQUESTS:
                keep_rows([{**asdict(found), "commit": machine().commit}], KEPT, ("model", "device_gib"))


if __name__ == "__main__":
    typer.run(main)
