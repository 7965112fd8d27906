"""``unified-cache replay``: from options to settings, the run, and its output.

The runner and the report are imported when a run begins: they bring torch and jinja2, and neither help nor a
refused option should wait for those.
"""

import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from unified_cache.byte_sizes import parse_bytes
from unified_cache.cli.json_output import check_json_file, shown_as_json
from unified_cache.cli.layout import size_named
from unified_cache.cli.options import JsonFileOption, JsonOption
from unified_cache.cli.progress import progress_on
from unified_cache.cli.table import print_result
from unified_cache.config import EvictionPolicy, Prefetching, Retention, WritePolicy
from unified_cache.errors import CacheError, ConfigError
from unified_cache.extras import import_with_extra
from unified_cache.files import check_writable
from unified_cache.replay.model_settings import (
    DEVICE_BYTES,
    HOST_BYTES,
    SCALE,
    STORAGE_BYTES,
    ModelSettings,
)
from unified_cache.replay.policies import ReplayPolicies
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.summary import headline
from unified_cache.replay.trace import read_trace

if TYPE_CHECKING:
    from types import ModuleType

    from unified_cache.replay.result import ReplayResult

__all__ = ["ReplayCommand", "replay_app"]

REPLAY_EPILOG = """**Examples**

What would an L1 of 50,000 pages hit? No payload moves:

    unified-cache replay trace.jsonl.gz --device-pages 50000 --host-pages 0 --no-bytes

Three tiers, every byte verified, and a page to look at:

    unified-cache replay trace.jsonl.gz --storage file:/tmp/kv --report out

All pools of a model, tiers in the bytes they would take:

    unified-cache replay trace.jsonl.gz --model deepseek-v4-flash --device-bytes 40GiB --host-bytes 500GiB
"""

replay_app = typer.Typer(rich_markup_mode="markdown")

NO_STORAGE = "none"
"""In the place of a store's URL."""


@dataclass(frozen=True, slots=True)
class ReplayCommand:
    """Replay a request trace against a cache of given tier sizes and print the hits of each tier.

    Payloads are made from page keys, written to device pages as an engine would, and every page handed back, from
    any tier, is compared byte for byte. One request at a time: a run depends on trace and sizes alone.

    With --model, pages are that model's: all its pools, tiers sized in the bytes they would really take, payloads
    scaled down. Without, there is one pool of full attention, and tiers are sized in pages.
    """

    trace: Annotated[Path, typer.Argument(help="Request trace in the Mooncake format, plain or .gz.")]
    page_size: Annotated[int | None, typer.Option(help="Tokens per page. [default: 512, or the model's usual]")] = None
    device_pages: Annotated[int | None, typer.Option(help="Pages of the device (L1). [default: 2000]")] = None
    host_pages: Annotated[int | None, typer.Option(help="Pages of host memory (L2); 0 for no L2. [default: 20000]")] = (
        None
    )
    page_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Payload of one page, as in 4096 or 1MiB. [default: 4KiB]")
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A preset, a config.json or a directory with one.")
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="What the model's K and V are kept in; its own dtype if absent.")
    ] = None
    device_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="True bytes of the model's device pools. [default: 64GiB]")
    ] = None
    host_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="True bytes of its host memory; 0 for none. [default: 256GiB]")
    ] = None
    scale_bytes: Annotated[
        float | None, typer.Option(metavar="F", help="Part of a page's true bytes that moves. [default: 1/1024]")
    ] = None
    keep_tail: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help=f"Keep windows this far before a prompt's end. [default: {Retention().tail_tokens}, as a cache does]",
        ),
    ] = None
    keep_branches: Annotated[
        bool, typer.Option(help="Keep windows and states where a prompt leaves what was seen before.")
    ] = True
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store (L3): memory:, file:DIR, packed:DIR or none. [default: none; with --model memory: of 2TiB]",
        ),
    ] = None
    storage_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Cap on the store, as in 500MB or 4GiB; a model's true bytes.")
    ] = None
    policy: Annotated[
        EvictionPolicy, typer.Option(help="What device and host memory evict first.", case_sensitive=False)
    ] = EvictionPolicy.LRU
    evict_device: Annotated[
        EvictionPolicy | None,
        typer.Option(help="What the device evicts first. [default: as --policy]", case_sensitive=False),
    ] = None
    evict_host: Annotated[
        EvictionPolicy | None,
        typer.Option(help="What host memory evicts first. [default: as --policy]", case_sensitive=False),
    ] = None
    write: Annotated[
        WritePolicy,
        typer.Option(help="When prompts go to host and storage; on_call: once served.", case_sensitive=False),
    ] = WritePolicy.ON_CALL
    prefetch_min_tokens: Annotated[
        int, typer.Option(metavar="N", help="Fewer tokens than these are not read from storage.")
    ] = 0
    prefetch_host_share: Annotated[
        float, typer.Option(metavar="F", help="Largest share of host memory that one prefetch may fill, in (0, 1].")
    ] = 1.0
    engines: Annotated[
        int,
        typer.Option(metavar="N", help="Engines dealt the requests in turn, each with tiers of its own, one store."),
    ] = 1
    limit: Annotated[int | None, typer.Option(help="Replay the trace's first N requests only.", metavar="N")] = None
    no_bytes: Annotated[
        bool, typer.Option("--no-bytes", help="Move and verify no payloads: the same hits at full speed, for sizing.")
    ] = False
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a page and a picture of hits over time there.")
    ] = None
    as_json: JsonOption = False
    json_file: JsonFileOption = None

    def run(self) -> None:
        """Replay and show the result.

        Raises:
            InputError: settings or trace cannot be used; nothing was touched.
            CacheError: storage failed, or the cache handed back wrong bytes or lost slots.
            OSError: report or JSON file cannot be written.

        """
        settings = self._plain_settings() if self.model is None else self._model_settings(self.model)
        requests = read_trace(self.trace, self.limit)
        runner = import_with_extra("unified_cache.replay.runner", "engine", "replay")
        report = None if self.report is None else import_with_extra("unified_cache.replay.report", "report", "--report")
        if self.report is not None:
            self.report.mkdir(parents=True, exist_ok=True)
            check_writable(self.report)
        check_json_file(self.json_file)
        with progress_on(sys.stderr, len(requests) * (2 if settings.plan.compares_private_stores else 1)) as watch:
            result: ReplayResult = runner.replay(self.trace.name, requests, settings, watch)
        self._show(result, report)
        if result.wrong_pages or result.leaked_slots:
            raise CacheError(
                f"{result.wrong_pages} of {result.pages_verified} pages handed back held wrong bytes, "
                f"{result.leaked_slots} slots leaked; this is a bug, please report it"
            )

    def _plain_settings(self) -> ReplaySettings:
        self._refuse("need --model", "device_bytes", "host_bytes", "scale_bytes", "keep_tail", "dtype")
        defaults = ReplaySettings()
        return ReplaySettings(
            page_size=_given(self.page_size, defaults.page_size),
            device_pages=_given(self.device_pages, defaults.device_pages),
            host_pages=_given(self.host_pages, defaults.host_pages),
            storage=None if self.storage == NO_STORAGE else self.storage,
            storage_bytes=_bytes_or(None, "--storage-bytes", self.storage_bytes),
            page_bytes=_bytes_or(defaults.page_bytes, "--page-bytes", self.page_bytes),
            with_bytes=not self.no_bytes,
            policies=self._policies(),
            engines=self.engines,
        )

    def _policies(self) -> ReplayPolicies:
        prefetching = Prefetching(threshold_tokens=self.prefetch_min_tokens, host_share=self.prefetch_host_share)
        device, host = _given(self.evict_device, self.policy), _given(self.evict_host, self.policy)
        return ReplayPolicies(device, host, self.write, prefetching)

    def _model_settings(self, model: str) -> ModelSettings:
        self._refuse(
            "do not go with --model, whose tiers are sized in bytes", "device_pages", "host_pages", "page_bytes"
        )
        sized = size_named(model, page_size=self.page_size, dtype=self.dtype)
        host_bytes = _bytes_or(HOST_BYTES, "--host-bytes", self.host_bytes)
        storage = self.storage or ("memory:" if host_bytes else NO_STORAGE)
        return ModelSettings(
            name=model,
            sized=sized,
            retention=Retention(_given(self.keep_tail, Retention().tail_tokens), self.keep_branches),
            device_bytes=_bytes_or(DEVICE_BYTES, "--device-bytes", self.device_bytes),
            host_bytes=host_bytes,
            storage=None if storage == NO_STORAGE else storage,
            storage_bytes=_bytes_or(None if self.storage else STORAGE_BYTES, "--storage-bytes", self.storage_bytes),
            scale=_given(self.scale_bytes, SCALE),
            with_bytes=not self.no_bytes,
            policies=self._policies(),
            engines=self.engines,
        )

    def _refuse(self, reason: str, *names: str) -> None:
        """Refuse options that were given and mean nothing here.

        Raises:
            ConfigError: there are such; the message names them.

        """
        options = {field.name: value for field, value in zip(fields(self), astuple(self), strict=True)}
        given = [f"--{name.replace('_', '-')}" for name in names if options[name] is not None]
        if given:
            raise ConfigError(f"{', '.join(given)} {reason}")

    def _show(self, result: "ReplayResult", report: "ModuleType | None") -> None:
        value = {"headline": headline(result), **result.as_json()}
        if not shown_as_json("replay", value, on_stdout=self.as_json, file=self.json_file):
            print_result(sys.stdout, result)
        if report is not None and self.report is not None:
            page: Path = report.write_report(result, self.report)
            sys.stderr.write(f"report: {page}\n")


_T = TypeVar("_T")


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _bytes_or(default: _T, option: str, text: str | None) -> int | _T:
    return default if text is None else parse_bytes(option, text)


replay_app.command("replay", epilog=REPLAY_EPILOG)(ReplayCommand)
