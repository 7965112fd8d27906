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
from unified_cache.cli.options import (
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
from unified_cache.core.errors import CacheError, ConfigError
from unified_cache.core.extras import import_with_extra
from unified_cache.core.sizes import parse_bytes
from unified_cache.sizing.replay.plan import DEVICE_BYTES, DEVICE_PAGES, HOST_BYTES, HOST_PAGES, ReplayPlan
from unified_cache.sizing.replay.report import page_of
from unified_cache.sizing.replay.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from unified_cache.sizing.replay.result import ReplayResult

_T = TypeVar("_T")

REPLAY_EPILOG = """**Examples**

Three tiers, every byte verified, over a trace that `unified-cache samples` copies:

    unified-cache replay traces/mooncake_conversation_1000.jsonl.gz --limit 100 --storage file:kv-store

What would an L1 of 50,000 pages hit? No payload moves:

    unified-cache replay traces/mooncake_conversation_1000.jsonl.gz --device-pages 50000 --host-pages 0 --no-bytes

Why are hits as short as they are? A page to look at, with missed tokens by reason:

    unified-cache replay traces/mooncake_conversation_1000.jsonl.gz --host-pages 5000 --no-bytes --report out

All pools of a model, tiers in the bytes they would take:

    unified-cache replay trace.jsonl.gz --model deepseek-v4-flash --device-bytes 40GiB --host-bytes 500GiB
"""

replay_app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class ReplayCommand(JsonOptions):
    """Replay a request trace against a cache of given tier sizes and print the hits of each tier.

    Payloads are made from page keys, written to device pages as an engine would, and every page handed back, from
    any tier, is compared byte for byte. One request at a time: a run depends on trace and sizes alone.

    With --model, pages are that model's: all its pools, tiers sized in the bytes they would really take, payloads
    scaled down. Without, there is one pool of full attention, and tiers are sized in pages.
    """

    trace: Annotated[Path, typer.Argument(help="Request trace of Mooncake or Bailian, or a recording, plain or .gz.")]
    page_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per page. [default: a block of the trace, or the model's usual]"),
    ] = None
    device_pages: Annotated[
        int | None, typer.Option(min=1, help="Pages of the device (L1), without a model. [default: 2000]")
    ] = None
    host_pages: Annotated[
        int | None, typer.Option(min=0, help="Pages of host memory (L2), without a model; 0 for none. [default: 20000]")
    ] = None
    model: ModelOption = None
    device_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="True bytes of the model's device pools (L1). [default: 64GiB]")
    ] = None
    host_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="True bytes of host memory (L2), headers included; 0 for none. [default: 256GiB]"
        ),
    ] = None
    keep_tail: KeepTailOption = 0
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Store (L3): memory:, file:DIR or packed:DIR. [default: none]"),
    ] = None
    storage_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Cap on the store; a model's true bytes, headers included.")
    ] = None
    engines: EnginesOption = 1
    limit: LimitOption = None
    moves_bytes: Annotated[
        bool,
        typer.Option(
            "--bytes/--no-bytes",
            help="Move and verify payloads; without them the same hits at full speed, for sizing.",
        ),
    ] = True
    explain: Annotated[
        bool, typer.Option("--explain", help="Break missed tokens down by reason and component, as --report does.")
    ] = False
    report: ReportOption = None

    def run(self) -> None:
        """Replay and show the result."""
        if self.model is None:
            sizes = {"--device-bytes": self.device_bytes, "--host-bytes": self.host_bytes}
            _refuse({**sizes, "--keep-tail": self.keep_tail or None}, "need --model")
        else:
            pages = {"--device-pages": self.device_pages, "--host-pages": self.host_pages}
            _refuse(pages, "do not go with --model, whose tiers are sized in bytes")
        self._plan(BLOCK_TOKENS)  # what cannot be is refused before the trace is read
        requests = read_watched(self.trace, self.limit)
        plan = self._plan(requests[0].block_tokens)
        runner = import_with_extra("unified_cache.sizing.replay.runner", "engine", "replay")
        write_page = page_writer(self.report)
        with watched(sys.stderr, "replay", len(requests), "requests") as on_progress:
            result: ReplayResult = runner.replay(self.trace.name, requests, plan, on_progress)
        page = page_of(result)
        if not self.shown_as_json("replay", {"headline": page.headline, **result.as_json()}):
            print_page(page)
        write_page(page)
        if result.wrong_pages or result.leaked_slots:
            raise CacheError(
                f"{result.wrong_pages} of {result.pages_verified} pages handed back held wrong bytes, "
                f"{result.leaked_slots} slots leaked; this is a bug, please report it"
            )

    def _plan(self, block_tokens: int) -> ReplayPlan:
        """Return what the options say of a trace whose blocks have so many tokens."""
        storage_bytes = _bytes("--storage-bytes", self.storage_bytes, None)
        if self.model is None:
            plan = ReplayPlan.of_pages(
                block_tokens if self.page_size is None else self.page_size,
                DEVICE_PAGES if self.device_pages is None else self.device_pages,
                HOST_PAGES if self.host_pages is None else self.host_pages,
                self.storage,
                storage_bytes,
            )
        else:
            plan = ReplayPlan.of_model(
                self.model,
                size_named(self.model, page_size=self.page_size),
                Retention(self.keep_tail),
                _bytes("--device-bytes", self.device_bytes, DEVICE_BYTES),
                _bytes("--host-bytes", self.host_bytes, HOST_BYTES),
                self.storage,
                storage_bytes,
            )
        explains = self.explain or self.report is not None
        return replace(plan, with_bytes=self.moves_bytes, engines=self.engines, explains=explains)


def _refuse(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that were given and mean nothing here."""
    if found := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"{', '.join(found)} {reason}")


def _bytes(option: str, text: str | None, default: _T) -> int | _T:
    return default if text is None else parse_bytes(option, text)


replay_app.command("replay", epilog=REPLAY_EPILOG)(ReplayCommand)
