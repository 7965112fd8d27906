"""``unified-cache replay``: from options to settings, the run, and its output.

The runner is imported when a run begins: it brings torch, and neither help nor a refused option should wait for that.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import watched
from unified_cache.cli.replay_settings import replay_settings
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.cli.setting_options import ConfigOption, SetOption, SettingOption, given_flags
from unified_cache.cli.traces import read_watched
from unified_cache.config import EvictionPolicy, WritePolicy
from unified_cache.errors import CacheError
from unified_cache.extras import import_with_extra
from unified_cache.replay.report import page_of
from unified_cache.settings.loading import read_settings
from unified_cache.settings.programs import ReplayChoices

if TYPE_CHECKING:
    from unified_cache.replay.result import ReplayResult

__all__ = ["ReplayCommand", "replay_app"]

REPLAY_EPILOG = """**Examples**

What would an L1 of 50,000 pages hit? No payload moves:

    unified-cache replay trace.jsonl.gz --device-pages 50000 --host-pages 0 --no-bytes

Three tiers, every byte verified, and a page to look at:

    unified-cache replay trace.jsonl.gz --storage file:/tmp/kv --report out

Why are hits as short as they are? Missed tokens by reason:

    unified-cache replay trace.jsonl.gz --host-pages 5000 --no-bytes --explain

All pools of a model, tiers in the bytes they would take:

    unified-cache replay trace.jsonl.gz --model deepseek-v4-flash --device-bytes 40GiB --host-bytes 500GiB
"""

replay_app = typer.Typer(rich_markup_mode="markdown")

WIDTH_MIN = 80
"""Columns assumed where the output is no terminal; the tables fit."""


@dataclass(frozen=True, slots=True)
class ReplayCommand(JsonOptions):
    """Replay a request trace against a cache of given tier sizes and print the hits of each tier.

    Payloads are made from page keys, written to device pages as an engine would, and every page handed back, from
    any tier, is compared byte for byte. One request at a time: a run depends on trace and sizes alone.

    With --model, pages are that model's: all its pools, tiers sized in the bytes they would really take, payloads
    scaled down. Without, there is one pool of full attention, and tiers are sized in pages.
    """

    trace: Annotated[Path, typer.Argument(help="Request trace in the Mooncake format, plain or .gz.")]
    page_size: Annotated[int | None, SettingOption(ReplayChoices, "page_size")] = None
    device_pages: Annotated[int | None, SettingOption(ReplayChoices, "device_pages")] = None
    host_pages: Annotated[int | None, SettingOption(ReplayChoices, "host_pages")] = None
    page_bytes: Annotated[str | None, SettingOption(ReplayChoices, "page_bytes")] = None
    model: Annotated[str | None, SettingOption(ReplayChoices, "model", "MODEL")] = None
    dtype: Annotated[str | None, SettingOption(ReplayChoices, "dtype")] = None
    device_bytes: Annotated[str | None, SettingOption(ReplayChoices, "device_bytes")] = None
    host_bytes: Annotated[str | None, SettingOption(ReplayChoices, "host_bytes")] = None
    scale_bytes: Annotated[float | None, SettingOption(ReplayChoices, "scale_bytes", "F")] = None
    keep_tail: Annotated[int | None, SettingOption(ReplayChoices, "retention.tail_tokens", "TOKENS")] = None
    keep_branches: Annotated[bool | None, SettingOption(ReplayChoices, "retention.branches")] = None
    storage: Annotated[str | None, SettingOption(ReplayChoices, "storage", "URL")] = None
    storage_bytes: Annotated[str | None, SettingOption(ReplayChoices, "storage_bytes")] = None
    policy: Annotated[
        EvictionPolicy | None, typer.Option(help="What device and host memory evict first.", case_sensitive=False)
    ] = None
    evict_device: Annotated[EvictionPolicy | None, SettingOption(ReplayChoices, "eviction.device")] = None
    evict_host: Annotated[EvictionPolicy | None, SettingOption(ReplayChoices, "eviction.host")] = None
    write: Annotated[WritePolicy | None, SettingOption(ReplayChoices, "write")] = None
    prefetch_min_tokens: Annotated[
        int | None,
        SettingOption(ReplayChoices, "prefetching.threshold_tokens", "N"),
    ] = None
    prefetch_host_share: Annotated[float | None, SettingOption(ReplayChoices, "prefetching.host_share", "F")] = None
    engines: Annotated[int | None, SettingOption(ReplayChoices, "engines", "N")] = None
    limit: Annotated[int | None, SettingOption(ReplayChoices, "limit", "N")] = None
    moves_bytes: Annotated[bool | None, SettingOption(ReplayChoices, "bytes")] = None
    config: ConfigOption = None
    assigned: SetOption = None
    explain: Annotated[bool | None, SettingOption(ReplayChoices, "explain")] = None
    report: Annotated[Path | None, SettingOption(ReplayChoices, "report", "DIR")] = None

    def run(self) -> None:
        """Replay and show the result.

        Raises:
            InputError: settings or trace cannot be used; nothing was touched.
            CacheError: storage failed, or the cache handed back wrong bytes or lost slots.
            OSError: report or JSON file cannot be written.

        """
        flags = given_flags(self, {"eviction.device": self.policy, "eviction.host": self.policy})
        loaded = read_settings(ReplayChoices, self.config, flags, self.assigned or ())
        explain, directory = loaded.settings.explain, loaded.settings.report
        settings = replace(replay_settings(loaded), explains=directory is not None if explain is None else explain)
        requests = read_watched(self.trace, loaded.settings.limit)
        runner = import_with_extra("unified_cache.replay.runner", "engine", "replay")
        write_page = page_writer(directory)
        self.check_json_file()
        total = len(requests) * (2 if settings.plan.compares_private_stores else 1)
        with watched(sys.stderr, "replay", total, "requests") as tell:
            result: ReplayResult = runner.replay(self.trace.name, requests, settings, tell)
        page = page_of(result)
        if not self.shown_as_json("replay", {"headline": page.headline, **result.as_json()}):
            print_page(page, WIDTH_MIN)
        write_page(page)
        if result.wrong_pages or result.leaked_slots:
            raise CacheError(
                f"{result.wrong_pages} of {result.pages_verified} pages handed back held wrong bytes, "
                f"{result.leaked_slots} slots leaked; this is a bug, please report it"
            )


replay_app.command("replay", epilog=REPLAY_EPILOG)(ReplayCommand)
