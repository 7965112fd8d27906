"""``unified-cache plan``: from options to a sweep, the plan, and its output."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.layout import size_named
from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import read_watched, watched
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.cli.setting_options import SettingOption, given_flags
from unified_cache.core.config import EvictionPolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import import_with_extra
from unified_cache.core.hits import Hits
from unified_cache.core.settings.loading import read_flags
from unified_cache.core.settings.programs import PlanChoices
from unified_cache.sizing.plan.hardware import Hardware, hardware_named, read_hardware
from unified_cache.sizing.plan.planner import Planner
from unified_cache.sizing.plan.report import page_of
from unified_cache.sizing.plan.sweep import TIERS, PlannedModel, combinations, parse_sweeps
from unified_cache.sizing.plan.tier_hits import ServePlan
from unified_cache.sizing.replay.plan import ReplayPlan, ReplayPolicies

__all__ = ["PlanCommand", "plan_app"]

PLAN_EPILOG = """**Examples**

    unified-cache plan trace.jsonl.gz --model deepseek-v4-flash --devices 8

    unified-cache plan trace.jsonl.gz --model gpt-oss-120b --sweep host=0,256GiB,1TiB --sweep storage=0..8TiB:6

    unified-cache plan trace.jsonl.gz --model qwen3-next --hardware ours.toml --storage-ratio .7 --report out

    unified-cache plan trace.jsonl.gz --model deepseek-v4-flash --policy priority --limit 2000
"""

plan_app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class PlanCommand(JsonOptions):
    """Show what to buy: the hit ratio of a trace for every combination of tier sizes, and what it brings.

    Distances in the LRU stack give the hits of all sizes in a few passes over the trace. For other policies each size
    of memory is replayed. Beside the hit ratio is the bound of any policy with as many bytes. The hardware turns
    hits into time to the first token, prefill saved, money and wear; what is recommended costs least for a token and
    keeps up with the trace.
    """

    trace: Annotated[Path, typer.Argument(help="Request trace of Mooncake or Bailian, or a recording, plain or .gz.")]
    model: Annotated[str | None, SettingOption(PlanChoices, "model", "MODEL")] = None
    devices: Annotated[int | None, SettingOption(PlanChoices, "devices")] = None
    engines: Annotated[int | None, SettingOption(PlanChoices, "engines", "N")] = None
    sweep: Annotated[list[str] | None, SettingOption(PlanChoices, "sweep", "TIER=SIZES")] = None
    hardware: Annotated[str | None, SettingOption(PlanChoices, "hardware", "NAME|FILE")] = None
    active_parameters: Annotated[float | None, SettingOption(PlanChoices, "active_parameters", "N")] = None
    storage_ratio: Annotated[float | None, SettingOption(PlanChoices, "storage_ratio", "SHARE")] = None
    page_size: Annotated[int | None, SettingOption(PlanChoices, "page_size")] = None
    dtype: Annotated[str | None, SettingOption(PlanChoices, "dtype")] = None
    keep_tail: Annotated[int | None, SettingOption(PlanChoices, "retention.tail_tokens", "TOKENS")] = None
    keep_branches: Annotated[bool | None, SettingOption(PlanChoices, "retention.branches")] = None
    policy: Annotated[
        EvictionPolicy | None,
        typer.Option(
            help="What device and host memory evict first; others than lru take replays.", case_sensitive=False
        ),
    ] = None
    evict_device: Annotated[EvictionPolicy | None, SettingOption(PlanChoices, "eviction.device")] = None
    evict_host: Annotated[EvictionPolicy | None, SettingOption(PlanChoices, "eviction.host")] = None
    check: Annotated[int | None, SettingOption(PlanChoices, "check", "N")] = None
    limit: Annotated[int | None, SettingOption(PlanChoices, "limit", "N")] = None
    report: Annotated[Path | None, SettingOption(PlanChoices, "report", "DIR")] = None

    def run(self) -> None:
        """Plan, and show the result."""
        flags = given_flags(self, {"eviction.device": self.policy, "eviction.host": self.policy})
        choices = read_flags(PlanChoices, flags)
        if choices.model is None:
            raise ConfigError("model must be set, found none; name a preset or config.json: --model gpt-oss-120b")
        model = PlannedModel(
            choices.model,
            size_named(choices.model, page_size=choices.page_size, dtype=choices.dtype),
            choices.retention,
            ReplayPolicies.evicting(choices.eviction),
            choices.devices,
            choices.engines,
            choices.storage_ratio,
        )
        hardware = _hardware(choices)
        # What does not fit is refused before the trace is read; of sizes that nobody named it is left out.
        named = [tier for tier in TIERS if any(text.strip().startswith(f"{tier}=") for text in choices.sweep)]
        sweep = model.fitting(combinations(parse_sweeps(choices.sweep)), named)
        write_page = page_writer(choices.report)
        self.check_json_file()
        serve = self._served(choices) if choices.check or not model.has_stack else None
        with watched(sys.stderr, "plan", len(sweep) + choices.check, "combinations") as on_progress:
            result = Planner(self.trace, choices.limit, model, hardware).plan(sweep, on_progress, choices.check, serve)
        page = page_of(result)
        if not self.shown_as_json("plan", result.as_json()):
            print_page(page)
        write_page(page)
        if not result.is_complete:
            raise KeyboardInterrupt(f"plan had {len(result.points):,} of {len(sweep):,} combinations, shown above")

    def _served(self, choices: PlanChoices) -> ServePlan:
        """Return what replays the trace."""
        purpose = "--check, and a plan for other policies than lru"
        runner = import_with_extra("unified_cache.sizing.replay.runner", "engine", purpose)
        requests = read_watched(self.trace, choices.limit)

        def serve(plan: ReplayPlan) -> list[Hits]:
            hits: list[Hits] = runner.served_hits(plan, requests)
            return hits

        return serve


def _hardware(choices: PlanChoices) -> Hardware:
    path = Path(choices.hardware)
    if path.suffix == ".toml" or path.is_file():
        return read_hardware(path, choices.active_parameters)
    return hardware_named(choices.hardware, choices.active_parameters)


plan_app.command("plan", epilog=PLAN_EPILOG)(PlanCommand)
