"""``unified-cache top``: the live page of a cache or a service in a terminal, or its figures once for a program."""

import os
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated, TypedDict, cast
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unified_cache.byte_sizes import size_text
from unified_cache.cli.json_output import check_json_file, shown_as_json
from unified_cache.cli.options import JsonFileOption, JsonOption
from unified_cache.cli.text import console_on, printable, table
from unified_cache.errors import CacheError, ConfigError
from unified_cache.nesting import parse_json

__all__ = ["TopCommand", "top_app"]

TOP_EPILOG = """**Examples**

    unified-cache top http://127.0.0.1:8765

    unified-cache top http://127.0.0.1:8765 --once --json
"""

TOKEN_VARIABLE = "UNIFIED_CACHE_LIVE_TOKEN"  # noqa: S105  # its name, not its value
"""Variable that holds the token of a page that needs one: other users of a machine can read a command line."""

ANSWER_S_MAX = 10.0
"""Longest wait for an answer."""

ANSWER_BYTES_MAX = 16 << 20
"""Largest answer; one of a hundred tenants takes 50 KB."""

BAR_COLUMNS = 30
"""Columns of a bar."""

FORMAT = 1
"""Version of a page's figures that is understood here."""

top_app = typer.Typer(rich_markup_mode="markdown")


class ShownLane(TypedDict):
    """One lane, as the page's figures have it."""

    tier: str
    component: str
    unit: str
    capacity: int
    pinned: int
    evictable: int
    in_flight: int
    free: int
    evicted: int


class ShownLeg(TypedDict):
    """Bytes moved one way."""

    name: str
    pages: int | None
    bytes: int


class ShownMinute(TypedDict):
    """Rates and ratios of the last minute."""

    lookups_per_s: float
    device_ratio: float
    host_ratio: float
    storage_ratio: float
    bytes_per_s: list[float]


class ShownSlow(TypedDict):
    """One of the slowest operations."""

    kind: str
    outcome: str
    pages: int | None
    seconds: float
    ended_at_s: float


class ShownStore(TypedDict):
    """State of the store."""

    breaker: str | None
    refused_calls: int
    retried_calls: int
    stuck_calls: int
    flawed_pages: int


class ShownTenant(TypedDict):
    """Calls and bytes of one tenant."""

    tenant: str
    running_calls: int
    waiting_calls: int
    bytes_in_flight: int
    stored_bytes: int


class ShownHit(TypedDict):
    """One short hit, and why it was short."""

    at_s: float
    pages: int
    page_size: int
    device: int
    host: int
    storage: int
    missed: int
    bound_by: list[str]
    reason: str
    picture: str


class ShownFigures(TypedDict):
    """Figures of a live page, as far as they are shown here."""

    name: str
    counted_at_s: float
    lanes: list[ShownLane]
    legs: list[ShownLeg]
    last_minute: ShownMinute
    operations_live: int
    slowest: list[ShownSlow]
    store: ShownStore | None
    tenants: list[ShownTenant] | None
    explanations: list[ShownHit]


@dataclass(frozen=True, slots=True)
class TopCommand:
    """Show what a cache or a service holds and does now, as its live page does.

    The page is that of `LivePage` in an engine, or of `unified-cache serve --live-port`. A token that it needs is taken
    from UNIFIED_CACHE_LIVE_TOKEN in the environment.
    """

    url: Annotated[str, typer.Argument(metavar="URL", help="Live page, as http://127.0.0.1:8765.")]
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=60, help="Between two looks.")] = 1.0
    once: Annotated[bool, typer.Option("--once", help="Show the figures of this moment and exit.")] = False
    as_json: JsonOption = False
    json_file: JsonFileOption = None

    def run(self) -> None:
        """Ask and show, until interrupted.

        Raises:
            ConfigError: no URL of a live page, or JSON without ``--once``.
            CacheError: the page does not answer, or refuses.
            OSError: the JSON file cannot be written.
        """
        if (self.as_json or self.json_file is not None) and not self.once:
            raise ConfigError("--json and --json-file show one moment; add --once")
        check_json_file(self.json_file)
        page = _page_of(self.url)
        figures = _asked(page)
        if self.once:
            if not shown_as_json("top", _without_version(figures), on_stdout=self.as_json, file=self.json_file):
                console_on(sys.stdout).print(_shown(figures))
            return
        if not sys.stdout.isatty():
            raise ConfigError("top without --once needs a terminal, found a pipe or a file")
        with Live(
            _shown(figures), console=Console(highlight=False, markup=False), screen=True, auto_refresh=False
        ) as live:
            while True:
                time.sleep(self.every)
                live.update(_shown(_asked(page)), refresh=True)


def _page_of(url: str) -> str:
    """Return where the figures of a live page are.

    Raises:
        ConfigError: it is no URL of a page.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"a live page is at http://HOST:PORT or https://HOST:PORT, found {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/figures.json"


def _asked(page: str) -> ShownFigures:
    """Ask a page for its figures.

    Raises:
        CacheError: it does not answer, refuses, or is of another version.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(page, headers=headers)  # noqa: S310  # http and https alone, see _page_of
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as answer:  # noqa: S310
            answered = parse_json(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise CacheError(
                f"{page} needs a valid token in {TOKEN_VARIABLE}, found {'none' if token is None else 'another'}"
            ) from None
        raise CacheError(f"{page} answers {error.code} {error.reason}; is it a live page?") from None
    except (OSError, HTTPException) as error:
        raise CacheError(f"{page} does not answer: {error}") from None
    except ValueError:
        raise CacheError(f"{page} must answer with the figures of a live page, found no JSON") from None
    found = answered.get("format") if isinstance(answered, dict) else None
    if found != FORMAT:
        raise CacheError(f"{page} must speak version {FORMAT} of a live page's figures, found {found}")
    return cast("ShownFigures", answered)


def _without_version(figures: ShownFigures) -> dict[str, object]:
    """Return the figures without the version of the page, in whose place that of the command's JSON stands."""
    return {name: value for name, value in figures.items() if name != "format"}


def _shown(figures: ShownFigures) -> RenderableType:
    """Return the figures as tables."""
    minute, store = figures["last_minute"], figures["store"]
    ratio = minute["device_ratio"] + minute["host_ratio"] + minute["storage_ratio"]
    said = f"{printable(figures['name'])}   hit ratio {ratio:.1%} (device {minute['device_ratio']:.1%}, "
    said += f"host {minute['host_ratio']:.1%}, storage {minute['storage_ratio']:.1%})   "
    said += f"{minute['lookups_per_s']:,.1f} look-ups/s   {figures['operations_live']} under way"
    parts: list[RenderableType] = [Text(said, style="bold"), _store_line(store), _lanes(figures["lanes"])]
    moved = table("way", "pages", "bytes", "last minute")
    for leg, rate in zip(figures["legs"], minute["bytes_per_s"], strict=True):
        pages = "" if leg["pages"] is None else f"{leg['pages']:,}"
        moved.add_row(leg["name"], pages, size_text(leg["bytes"]), f"{size_text(int(rate))}/s")
    parts.append(moved)
    if figures["slowest"]:
        slowest = table("slowest", "took", "pages", "outcome", "ended")
        for slow in figures["slowest"]:
            pages = "" if slow["pages"] is None else f"{slow['pages']:,}"
            ended = time.strftime("%H:%M:%S", time.localtime(slow["ended_at_s"]))
            slowest.add_row(slow["kind"], f"{slow['seconds'] * 1000:,.1f} ms", pages, slow["outcome"], ended)
        parts.append(slowest)
    if figures["tenants"]:
        tenants = table("tenant", "running", "waiting", "in flight", "stored")
        for each in figures["tenants"]:
            sizes = (size_text(each["bytes_in_flight"]), size_text(each["stored_bytes"]))
            tenants.add_row(each["tenant"], str(each["running_calls"]), str(each["waiting_calls"]), *sizes)
        parts.append(tenants)
    if figures["explanations"]:
        parts += _explanations(figures["explanations"])
    return Group(*parts)


def _explanations(hits: list[ShownHit]) -> list[RenderableType]:
    """Return the latest short hits as a table, and the picture of the newest."""
    shown = table("short hit", "pages", "device", "host", "storage", "missed", "why")
    for column in shown.columns:
        column.no_wrap = True
    why = shown.columns[-1]
    why.justify, why.no_wrap, why.overflow = "left", False, "fold"
    for hit in hits:
        counts = [f"{count:,}" for count in (hit["pages"], hit["device"], hit["host"], hit["storage"], hit["missed"])]
        shown.add_row(time.strftime("%H:%M:%S", time.localtime(hit["at_s"])), *counts, hit["reason"])
    picture = [Text(printable(line), no_wrap=True) for line in hits[0]["picture"].splitlines()]
    return [shown, *picture]


def _store_line(store: ShownStore | None) -> Text:
    if store is None:
        return Text("store: none attached")
    breaker = store["breaker"] or "without a guard"
    facts = f"{store['refused_calls']:,} calls refused, {store['retried_calls']:,} made again, "
    facts += f"{store['stuck_calls']:,} not returned, {store['flawed_pages']:,} flawed pages"
    return Text(f"store: breaker {breaker}; {facts}", style="bold red" if breaker in ("open", "half open") else "")


def _lanes(lanes: list[ShownLane]) -> Table:
    shown = table("tier", "component", "use", "used", "pinned", "in flight", "evictable", "free", "evicted", left=3)
    for lane in lanes:
        bar = Text()
        for part, style in (("pinned", "white"), ("in_flight", "magenta"), ("evictable", "blue")):
            bar.append("█" * round(BAR_COLUMNS * _part(lane, part) / lane["capacity"]), style=style)
        bar.append("░" * max(0, BAR_COLUMNS - len(bar)), style="bright_black")
        parts = [_part(lane, part) for part in ("pinned", "in_flight", "evictable", "free")]
        counts = [size_text(count) if lane["unit"] == "bytes" else f"{count:,}" for count in parts]
        used = f"{(lane['capacity'] - lane['free']) / lane['capacity']:.1%}"
        shown.add_row(lane["tier"], lane["component"], bar, used, *counts, f"{lane['evicted']:,}")
    return shown


def _part(lane: ShownLane, part: str) -> int:
    return {
        "pinned": lane["pinned"],
        "in_flight": lane["in_flight"],
        "evictable": lane["evictable"],
        "free": lane["free"],
    }[part]


top_app.command("top", epilog=TOP_EPILOG)(TopCommand)
