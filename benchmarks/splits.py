"""Hits of a device of so many bytes, by how its bytes are split between full attention and windows or states.

    python -m benchmarks.splits [--model NAME] [--device-gib N] [--requests N]

The conversation trace, pages of 256 tokens, a device alone, windows and states kept at prompts' ends and at branches. A
replay splits bytes as a typical prompt adds to each component; here windows get a multiple of that, and full attention
the rest. What ran takes the place of its models and splits in ``benchmarks/results/splits.json``.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import machine
from benchmarks.report import keep_rows
from benchmarks.window_bytes import DEVICES_GIB, MODELS, PAGE_TOKENS, REQUESTS, TRACE, token_ratio
from unified_cache.components.layouts import size_preset
from unified_cache.core.config import EvictionPolicy, Retention
from unified_cache.sizing.replay.plan import ReplayPolicies, component_bytes
from unified_cache.sizing.replay.settings import ModelSettings
from unified_cache.sizing.replay.trace import TraceRequest, iterate_trace

KEPT = Path(__file__).resolve().parent / "results" / "splits.json"
MULTIPLES = (0.15, 0.25, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.2, 3.2, 5.0)
"""Windows, of those that a replay would have."""
WINDOWS_SHARE_MAX = 0.95
"""Largest part of the bytes for windows: some are full attention's."""
POLICIES = (EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE)


@dataclass(frozen=True, slots=True)
class SplitRun:
    """Token hit ratios of one split of a model's device."""

    model: str
    device_gib: int
    requests: int
    windows: float
    """Multiple of the windows that a replay would have."""
    windows_share: float
    """Part of all bytes that they have."""
    pages: tuple[int, ...]
    lru: float
    adaptive: float

    def __str__(self) -> str:
        return (
            f"{self.model} {self.device_gib} GiB: {self.windows:4} windows, {self.windows_share:.3f} of the bytes: "
            f"lru {self.lru:.4f}, adaptive {self.adaptive:.4f}"
        )


def split_runs(model: str, device_gib: int, requests: list[TraceRequest]) -> Iterator[SplitRun]:
    """Replay a trace under every split, few windows first."""
    sized = size_preset(model, page_size=PAGE_TOKENS)
    plan = ModelSettings(
        model, sized, Retention(), device_gib << 30, 0, storage=None, storage_bytes=None, with_bytes=False
    ).plan
    bytes_of = [component_bytes(component) for component in plan.true_layout.components]
    full, *windows = (count * size for count, size in zip(plan.device_pages, bytes_of, strict=True))
    share = sum(windows) / (full + sum(windows))
    for multiple in MULTIPLES:
        if share * multiple > WINDOWS_SHARE_MAX:
            break
        full_pages = int(plan.device_pages[0] * (1 - share * multiple) / (1 - share))
        pages = (full_pages, *(max(int(count * multiple), 1) for count in plan.device_pages[1:]))
        policies = (ReplayPolicies(device=policy) for policy in POLICIES)
        plans = (replace(plan, device_pages=pages, policies=each) for each in policies)
        lru, adaptive = (token_ratio(each, requests) for each in plans)
        yield SplitRun(model, device_gib, len(requests), multiple, share * multiple, pages, lru, adaptive)


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"This alone: {', '.join(MODELS)}.")] = None,
    device_gib: Annotated[list[int] | None, typer.Option(metavar="N", help="Device of this size alone.")] = None,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of the trace, from its beginning.")] = REQUESTS,
) -> None:
    """Print and keep a row for each split."""
    trace = list(islice(iterate_trace(TRACE), requests))
    for name in model or MODELS:
        for gib in device_gib or DEVICES_GIB:
            for found in split_runs(name, gib, trace):
                print(found, flush=True)
                if requests == REQUESTS:
                    keep_rows([{**asdict(found), "commit": machine().commit}], KEPT, ("model", "device_gib", "windows"))


if __name__ == "__main__":
    typer.run(main)
