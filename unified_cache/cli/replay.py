"""``unified-cache replay``: from options to settings, the run, and its output.

The runner is imported when a run begins: it brings torch, and neither help nor a refused option should wait for that.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from unified_cache.cli.layout import size_named
from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import read_watched, watched
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.cli.setting_options import SettingOption, given_flags
from unified_cache.core.config import EvictionPolicy, WritePolicy
from unified_cache.core.errors import CacheError, ConfigError
from unified_cache.core.extras import import_with_extra
from unified_cache.core.settings.loading import read_flags
from unified_cache.core.settings.names import flag_name
from unified_cache.core.settings.programs import ReplayChoices
from unified_cache.core.settings.section import NONE
from unified_cache.core.settings.toml import flattened
from unified_cache.sizing.replay.plan import ReplayPolicies
from unified_cache.sizing.replay.report import page_of
from unified_cache.sizing.replay.settings import (
    DEVICE_BYTES,
    HOST_BYTES,
    SCALE,
    STORAGE_BYTES,
    ModelSettings,
    ReplaySettings,
)

if TYPE_CHECKING:
    from unified_cache.sizing.replay.result import ReplayResult

__all__ = ["ReplayCommand", "replay_app"]

_T = TypeVar("_T")

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

    trace: Annotated[Path, typer.Argument(help="Request trace of Mooncake or Bailian, or a recording, plain or .gz.")]
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
    explain: Annotated[bool | None, SettingOption(ReplayChoices, "explain")] = None
    report: Annotated[Path | None, SettingOption(ReplayChoices, "report", "DIR")] = None

    def run(self) -> None:
        """Replay and show the result."""
        flags = given_flags(self, {"eviction.device": self.policy, "eviction.host": self.policy})
        choices = read_flags(ReplayChoices, flags)
        explain, directory = choices.explain, choices.report
        settings = _plain(choices, flags) if choices.model is None else _of_model(choices, choices.model, flags)
        settings = replace(settings, explains=directory is not None if explain is None else explain)
        requests = read_watched(self.trace, choices.limit)
        if isinstance(settings, ReplaySettings) and choices.page_size is None:
            settings = replace(settings, page_size=requests[0].block_tokens)
        runner = import_with_extra("unified_cache.sizing.replay.runner", "engine", "replay")
        write_page = page_writer(directory)
        self.check_json_file()
        total = len(requests) * (2 if settings.plan.compares_private_stores else 1)
        with watched(sys.stderr, "replay", total, "requests") as on_progress:
            result: ReplayResult = runner.replay(self.trace.name, requests, settings, on_progress)
        page = page_of(result)
        if not self.shown_as_json("replay", {"headline": page.headline, **result.as_json()}):
            print_page(page, WIDTH_MIN)
        write_page(page)
        if result.wrong_pages or result.leaked_slots:
            raise CacheError(
                f"{result.wrong_pages} of {result.pages_verified} pages handed back held wrong bytes, "
                f"{result.leaked_slots} slots leaked; this is a bug, please report it"
            )


def _plain(found: ReplayChoices, flags: Mapping[str, object]) -> ReplaySettings:
    _refuse(flags, "need --model", "device_bytes", "host_bytes", "scale_bytes", "retention.tail_tokens", "dtype")
    defaults = ReplaySettings()
    return ReplaySettings(
        page_size=_given(found.page_size, defaults.page_size),
        device_pages=_of_one_pool("device_pages", found.device_pages, defaults.device_pages),
        host_pages=_of_one_pool("host_pages", found.host_pages, defaults.host_pages),
        storage=None if found.storage == NONE else found.storage,
        storage_bytes=found.storage_bytes,
        page_bytes=_given(found.page_bytes, defaults.page_bytes),
        with_bytes=found.bytes,
        policies=_policies(found),
        engines=found.engines,
    )


def _of_model(found: ReplayChoices, model: str, flags: Mapping[str, object]) -> ModelSettings:
    reason = "do not go with --model, whose tiers are sized in bytes"
    _refuse(flags, reason, "device_pages", "host_pages", "page_bytes")
    host_bytes = _given(found.host_bytes, HOST_BYTES)
    storage = found.storage or ("memory:" if host_bytes else NONE)
    return ModelSettings(
        name=model,
        sized=size_named(model, page_size=found.page_size, dtype=found.dtype),
        retention=found.retention,
        device_bytes=_given(found.device_bytes, DEVICE_BYTES),
        host_bytes=host_bytes,
        storage=None if storage == NONE else storage,
        storage_bytes=_given(found.storage_bytes, None if found.storage else STORAGE_BYTES),
        scale=_given(found.scale_bytes, SCALE),
        with_bytes=found.bytes,
        policies=_policies(found),
        engines=found.engines,
    )


def _policies(found: ReplayChoices) -> ReplayPolicies:
    return replace(ReplayPolicies.evicting(found.eviction), write=found.write, prefetching=found.prefetching)


def _of_one_pool(name: str, counts: tuple[int, ...] | None, default: int) -> int:
    if counts is None:
        return default
    if len(counts) != 1:
        raise ConfigError(f"{name} must be one number without a model, found {list(counts)}")
    return counts[0]


def _refuse(flags: Mapping[str, object], reason: str, *names: str) -> None:
    """Refuse settings that were given and mean nothing here."""
    given = {".".join(path) for path, _ in flattened(flags)}
    found = [flag_name(tuple(name.split("."))) for name in names if name in given]
    if found:
        raise ConfigError(f"{', '.join(found)} {reason}")


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


replay_app.command("replay", epilog=REPLAY_EPILOG)(ReplayCommand)
