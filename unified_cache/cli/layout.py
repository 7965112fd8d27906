"""``unified-cache layout``: the pools that a model needs, their sizes, and the cost of a million tokens in them."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.text import console_on
from unified_cache.components.layouts import (
    COST_TOKENS,
    PRESET_ALIASES,
    PRESETS,
    SizedLayout,
    is_preset,
    size_by_hand,
    size_hf_config,
    size_preset,
)
from unified_cache.core.errors import LayoutError, did_you_mean
from unified_cache.core.sizes import size_text
from unified_cache.core.window import SPAN_ALL

LAYOUT_EPILOG = """**Examples**

    unified-cache layout deepseek-v4-flash

    unified-cache layout path/to/config.json --page-size 64 --json
"""

layout_app = typer.Typer(rich_markup_mode="markdown")

WIDTH_MIN = 100
"""Columns assumed where the output is no terminal; the tables fit."""

TIERS = {"device": False, "host": True, "storage": True}
"""Tier to whether its pages are sealed, with a header beside the payload."""

PER_UNIT = ("bytes per page", "bytes per token")
"""Columns of a pool and of a component."""


@dataclass(frozen=True, slots=True)
class LayoutCommand(JsonOptions):
    """Show the pools of a model, their bytes per page and per token, and what a million tokens cost per tier.

    A model that has no config.json is given by hand: --layers 32 --heads 8 --head-dim 128 --dtype bfloat16.
    """

    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="A config.json, a model directory, or the name of a preset."),
    ] = None
    layers: Annotated[int | None, typer.Option(help="Without CONFIG: layers of full attention.")] = None
    heads: Annotated[int | None, typer.Option(help="Without CONFIG: heads of K and V in each layer.")] = None
    head_dim: Annotated[int | None, typer.Option(help="Without CONFIG: values of a head.")] = None
    page_size: Annotated[int | None, typer.Option(help="Tokens per page; the architecture's usual if absent.")] = None
    dtype: Annotated[
        str | None, typer.Option(help="What K and V are kept in, as in bfloat16 or fp8; the model's own if absent.")
    ] = None

    def run(self) -> None:
        """Lay out and show."""
        sized = self._sized()
        if not self.shown_as_json("layout", layout_as_json(sized)):
            print_layout(sys.stdout, sized)

    def _sized(self) -> SizedLayout:
        by_hand = {"--layers": self.layers, "--heads": self.heads, "--head-dim": self.head_dim}
        given = {name: value for name, value in by_hand.items() if value is not None}
        if self.config is not None:
            if given:
                raise LayoutError(f"{' and '.join(given)} must stand without CONFIG, found CONFIG {self.config!r}")
            return size_named(self.config, page_size=self.page_size, dtype=self.dtype)
        if self.layers is None or self.heads is None or self.head_dim is None:
            raise LayoutError(
                f"expected CONFIG, or {', '.join(by_hand)} together, found {', '.join(given) or 'neither'}"
            )
        return size_by_hand(self.layers, self.heads, self.head_dim, page_size=self.page_size, dtype=self.dtype)


def size_named(config: str, *, page_size: int | None = None, dtype: str | None = None) -> SizedLayout:
    """Return the layout of a preset, or else of the configuration at a path."""
    if is_preset(config):
        return size_preset(config, page_size=page_size, dtype=dtype)
    if not Path(config).exists():
        raise LayoutError(
            f"CONFIG must be a config.json, a directory with one, or a preset, found {config!r}"
            f"{did_you_mean(config, (*PRESETS, *PRESET_ALIASES))}; presets: {', '.join(PRESETS)}"
        )
    return size_hf_config(Path(config), page_size=page_size, dtype=dtype)


def layout_as_json(sized: SizedLayout) -> dict[str, object]:
    """Return what the tables show, as values that JSON has."""
    page_size = sized.layout.page_size
    return {
        "architecture": sized.architecture,
        "notes": [*sized.notes, *sized.left_out],
        "page_size": page_size,
        "window_tokens": sized.window_tokens,
        "pools": [
            {
                "name": pool.name,
                "component": component.name,
                "layers": sized.layers[pool.name],
                "page_bytes": pool.page_bytes,
                "token_bytes": pool.page_bytes / page_size,
            }
            for component in sized.layout.components
            for pool in component.pools
        ],
        "components": [
            {
                "name": component.name,
                "hit_policy": component.hit_policy,
                "span_pages": None if component.span == SPAN_ALL else component.span,
                "page_bytes": sum(pool.page_bytes for pool in component.pools),
            }
            for component in sized.layout.components
        ],
        "tokens": COST_TOKENS,
        "cost": {
            tier: {
                cost.component: {
                    "dense_bytes": cost.dense_bytes,
                    "trailing_bytes": cost.trailing_bytes,
                }
                for cost in sized.costs(sealed=sealed)
            }
            for tier, sealed in TIERS.items()
        },
    }


def print_layout(stream: TextIO, sized: SizedLayout) -> None:
    """Print the pools, the components, and the cost by tier."""
    console = console_on(stream, WIDTH_MIN)
    title = f"{sized.architecture}, pages of {sized.layout.page_size:,} tokens"
    if sized.window_tokens is not None:
        title += f", windows of {sized.window_tokens:,} tokens"
    console.print_line(title, style="bold")
    for note in sized.notes:
        console.print_line(f"note: {note}")
    for note in sized.left_out:
        console.print(f"note: {note}")
    console.print_table(("pool", "component", "layers", *PER_UNIT), _pool_rows(sized), left=2)
    console.print_table(("component", "a resume needs", *PER_UNIT), _component_rows(sized), left=2)
    names = [component.name for component in sized.layout.components]
    kept = [column for name in names[1:] for column in (f"{name} dense", f"{name} trailing")]
    totals = ["all dense", "all trailing"] if len(names) > 1 else []
    console.print_table((f"{COST_TOKENS:,} tokens", names[0], *kept, *totals), _cost_rows(sized))
    if len(sized.layout.components) > 1:
        console.print(
            "full: every page since the root. dense: the component kept at every page. "
            "trailing: kept only where one prompt of this length ends."
        )


def _pool_rows(sized: SizedLayout) -> Iterator[tuple[str, ...]]:
    for component in sized.layout.components:
        for pool in component.pools:
            layers = sized.layers[pool.name]
            shown_layers = f"{layers}" if layers else "logical"
            yield (pool.name, component.name, shown_layers, *_per_unit(sized, pool.page_bytes))


def _component_rows(sized: SizedLayout) -> Iterator[tuple[str, ...]]:
    for component in sized.layout.components:
        needs = "every page" if component.span == SPAN_ALL else _pages(component.span)
        yield (component.name, needs, *_per_unit(sized, sum(pool.page_bytes for pool in component.pools)))


def _per_unit(sized: SizedLayout, page_bytes: int) -> tuple[str, str]:
    """Return the bytes of a page, and of a token of it, as cells."""
    return f"{page_bytes:,}", f"{page_bytes / sized.layout.page_size:,.2f}".removesuffix(".00")


def _cost_rows(sized: SizedLayout) -> Iterator[tuple[str, ...]]:
    for tier, sealed in TIERS.items():
        first, *others = sized.costs(sealed=sealed)
        cells = [first.dense_bytes]
        for cost in others:
            cells += [cost.dense_bytes, cost.trailing_bytes]
        if others:
            cells.append(first.dense_bytes + sum(cost.dense_bytes for cost in others))
            cells.append(first.dense_bytes + sum(cost.trailing_bytes for cost in others))
        yield (tier, *map(size_text, cells))


def _pages(count: int) -> str:
    return "the last page" if count == 1 else f"the last {count:,} pages"


layout_app.command("layout", epilog=LAYOUT_EPILOG)(LayoutCommand)
