"""``unified-cache plan``: from options to a sweep, the plan, and its output."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.layout import size_named
from unified_cache.cli.options import (
    DtypeOption,
    EnginesOption,
    JsonOptions,
    KeepTailOption,
    LimitOption,
    ModelOption,
    ReportOption,
)
from unified_cache.cli.progress import read_watched, watched
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import import_with_extra
from unified_cache.sizing.plan.hardware import Hardware, hardware_named, read_hardware
from unified_cache.sizing.plan.planner import Planner, ServePlan
from unified_cache.sizing.plan.report import page_of
from unified_cache.sizing.plan.sweep import TIERS, PlannedModel, combinations, parse_sweeps

STORAGE_RATIO_MAX = 4
"""A page on as many nodes of a cluster."""

PLAN_EPILOG = """**Examples**

Over a trace that `unified-cache samples` copies:

    unified-cache plan traces/mooncake_conversation_1000.jsonl.gz --model deepseek-v4-flash --devices 8

    unified-cache plan trace.jsonl.gz --model gpt-oss-120b --sweep host=0,256GiB,1TiB --sweep storage=0..8TiB:6

    unified-cache plan trace.jsonl.gz --model qwen3-next --hardware ours.toml --storage-ratio .7 --report out
"""

plan_app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class PlanCommand(JsonOptions):
    """Show what to buy: the hit ratio of a trace for every combination of tier sizes, and what it brings.

    Distances in the LRU stack give the hits of all sizes in a few passes over the trace. The hardware turns hits
    into time to the first token, prefill saved, money and wear; what is recommended costs least for a token and keeps
    up with the trace.
    """

    trace: Annotated[Path, typer.Argument(help="Request trace of Mooncake or Bailian, or a recording, plain or .gz.")]
    model: ModelOption = None
    devices: Annotated[int, typer.Option(help="Devices of one engine, each of the size swept.")] = 1
    engines: EnginesOption = 1
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER=SIZES",
            help="Sizes of device, host or storage: TIER=FROM..TO, TIER=FROM..TO:STEPS, or TIER= a list. "
            "[default: device=16GiB..64GiB, host=0..2TiB, storage=0..20TiB]",
        ),
    ] = None
    hardware: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="h100, h200, b200, laptop, or a TOML file of speeds and prices.")
    ] = "h100"
    active_parameters: Annotated[
        float | None,
        typer.Option(metavar="N", help="Parameters that a token passes through, for the speed of prefill."),
    ] = None
    storage_ratio: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Bytes that storage keeps for each byte of a page: 0.7 for bfloat16 compressed, 2 for two replicas.",
        ),
    ] = 1.0
    page_size: Annotated[int | None, typer.Option(help="Tokens per page. [default: the model's usual]")] = None
    dtype: DtypeOption = None
    keep_tail: KeepTailOption = 0
    check: Annotated[
        int, typer.Option(min=0, metavar="N", help="Combinations that are replayed in full, to see how far off it is.")
    ] = 0
    limit: LimitOption = None
    report: ReportOption = None

    def run(self) -> None:
        """Plan, and show the result."""
        if self.model is None:
            raise ConfigError("--model must be set, found none; name a preset or config.json: --model gpt-oss-120b")
        if not 0 < self.storage_ratio <= STORAGE_RATIO_MAX:
            raise ConfigError(f"--storage-ratio must be in (0, {STORAGE_RATIO_MAX}], found {self.storage_ratio}")
        model = PlannedModel(
            self.model,
            size_named(self.model, page_size=self.page_size, dtype=self.dtype),
            Retention(self.keep_tail),
            self.devices,
            self.engines,
            self.storage_ratio,
        )
        hardware = _hardware(self.hardware, self.active_parameters)
        # What does not fit is refused before the trace is read; of sizes that nobody named it is left out.
        named = [tier for tier in TIERS if any(text.strip().startswith(f"{tier}=") for text in (self.sweep or ()))]
        sweep = model.fitting(combinations(parse_sweeps(self.sweep or ())), named)
        write_page = page_writer(self.report)
        serve: ServePlan | None = None
        if self.check:
            serve = import_with_extra("unified_cache.sizing.replay.runner", "engine", "--check").served_hits
        requests = read_watched(self.trace, self.limit)
        with watched(sys.stderr, "plan", len(sweep) + self.check, "combinations") as on_progress:
            planner = Planner(self.trace.name, requests, model, hardware)
            result = planner.plan(sweep, on_progress, self.check, serve)
        page = page_of(result)
        if not self.shown_as_json("plan", result.as_json()):
            print_page(page)
        write_page(page)
        if not result.is_complete:
            raise KeyboardInterrupt(f"plan had {len(result.points):,} of {len(sweep):,} combinations, shown above")


def _hardware(name: str, active_parameters: float | None) -> Hardware:
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return read_hardware(path, active_parameters)
    return hardware_named(name, active_parameters)


plan_app.command("plan", epilog=PLAN_EPILOG)(PlanCommand)
