"""A replay as a picture and a page: hit ratio over time by tier. Needs the extra ``[report]``."""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from unified_cache.files import write_whole
from unified_cache.replay.result import ReplayResult
from unified_cache.replay.summary import COLUMNS, COMPONENT_COLUMNS, component_rows, setting_rows, tier_rows, verdict

__all__ = ["draw", "write_report"]

PICTURE_NAME = "hit_ratio.png"
PAGE_NAME = "index.html"

COLOURS = {"device": "#0072B2", "host": "#56B4E9", "storage": "#E69F00"}
"""Told apart by all kinds of colour vision, and by lightness in print; from Okabe and Ito, 2008."""

INK = "#1f2933"
FAINT = "#7b8794"
SMOOTH_WINDOWS = 3
"""Windows averaged into one point: single windows of a trace jump with the luck of a few long prompts."""

_Floats = npt.NDArray[np.float64]

_PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Replay of {{ trace }}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 60rem;
         margin: 2.5rem auto; padding: 0 1.25rem; }
  h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
  h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
  .lead { font-size: 1.15rem; margin: 0 0 1.5rem; color: #52606d; }
  .lead strong { color: #1f2933; }
  .bad { background: #fdecea; border-left: 4px solid #b3261e; padding: .6rem 1rem; }
  img { width: 100%; height: auto; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: .4rem .75rem; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
  th:first-child, td:first-child { text-align: left; padding-left: 0; }
  th { font-weight: 600; color: #52606d; }
  tr:last-child td { border-bottom: 0; }
  .tiers tr:last-child td { font-weight: 600; border-top: 2px solid #cbd2d9; }
  .settings td { text-align: left; white-space: normal; padding-top: .2rem; padding-bottom: .2rem; }
  .settings td:first-child { color: #52606d; width: 10rem; }
  .swatch { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .5em; }
  ul { padding-left: 1.2rem; margin: .5rem 0; }
</style>
</head>
<body>
<h1>Replay of {{ trace }}</h1>
<p class="lead"><strong>{{ ratio }}</strong> of the blocks asked for were handed back;
  {{ seen }} had been asked for before.</p>
{% if wrong %}<p class="bad">{{ wrong }}</p>{% endif %}
<img alt="Hit ratio over time, stacked by tier" src="data:image/png;base64,{{ picture }}">
<h2>By tier</h2>
<div class="wide"><table class="tiers">
<thead><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{% if loop.first and cell in colours -%}
<span class="swatch" style="background:{{ colours[cell] }}"></span>{% endif %}{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% if component_rows %}<h2>By component</h2>
<div class="wide"><table>
<thead><tr>{% for name in component_columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in component_rows %}<tr>{% for cell in row %}<td>{% if loop.first -%}
<span class="swatch" style="background:{{ colours[cell] }}"></span>{% endif %}{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endif %}<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>
<h2>What was run</h2>
<table class="settings"><tbody>
{% for name, value in settings %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</tbody></table>
</body>
</html>
""")


def write_report(result: ReplayResult, directory: Path) -> Path:
    """Write picture and page into ``directory``; return the path of the page, which holds the picture too.

    Raises:
        OSError: they cannot be written; neither is left half-written.

    """
    picture = draw(result)
    wrong = ""
    if result.wrong_pages or result.leaked_slots:
        wrong = f"{result.wrong_pages:,} pages held wrong bytes, {result.leaked_slots:,} slots leaked: this is a bug."
    page = _PAGE.render(
        trace=result.trace,
        ratio=f"{result.block_hit_ratio:.1%}",
        seen=f"{result.seen_ratio:.1%}",
        wrong=wrong,
        picture=base64.b64encode(picture).decode("ascii"),
        columns=COLUMNS,
        rows=tier_rows(result),
        component_columns=COMPONENT_COLUMNS,
        component_rows=component_rows(result),
        colours=COLOURS,
        lines=verdict(result),
        settings=setting_rows(result),
    )
    write_whole(directory / PICTURE_NAME, picture)
    write_whole(directory / PAGE_NAME, page.encode())
    return directory / PAGE_NAME


def draw(result: ReplayResult) -> bytes:
    """Draw the hit ratio over the run, stacked by tier, fastest at the bottom; return a PNG."""
    figure = Figure(figsize=(10, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x, bands, seen = _curves(result)
    present = [tier for tier in bands if tier == "device" or _has(result, tier)]
    drawn = axes.stackplot(
        x, [bands[tier] for tier in present], colors=[COLOURS[tier] for tier in present], linewidth=0
    )
    for area, tier in zip(drawn, present, strict=True):
        area.set_label(f"{tier}  {result.hits.by_tier()[tier] / max(1, result.pages):.1%}")
    (line,) = axes.plot(x, seen, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    line.set_label(f"asked for before  {result.seen_ratio:.1%}")
    _dress(axes, result, float(max(seen.max(), np.stack(list(bands.values())).sum(axis=0).max())))
    _add_time_axis(axes, result)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside right upper",
        frameon=False,
        labelcolor=INK,
        title="share of blocks,\nwhole run",
        alignment="left",
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _has(result: ReplayResult, tier: str) -> bool:
    plan = result.settings.plan
    return plan.has_host if tier == "host" else plan.storage is not None


def _curves(result: ReplayResult) -> tuple[_Floats, dict[str, _Floats], _Floats]:
    """Return where the points lie, and the smoothed ratios there: by tier, and of what had been asked for before."""
    series = result.series
    asked = _smooth([window.pages for window in series])
    asked[asked == 0] = 1
    middles = np.array([(window.start + window.end) / 2 for window in series])
    bands = {
        tier: _smooth([window.hits.by_tier()[tier] for window in series]) / asked for tier in result.hits.by_tier()
    }
    seen = _smooth([window.seen_pages for window in series]) / asked
    # To both ends of the run, so that nothing seems to be missing there; a single point becomes a plateau.
    x = np.concatenate(([0.0], middles, [float(result.requests)]))
    return x, {tier: np.pad(band, 1, mode="edge") for tier, band in bands.items()}, np.pad(seen, 1, mode="edge")


def _smooth(counts: Sequence[int]) -> _Floats:
    """Sum neighbouring windows; at the ends, those there are."""
    kernel = np.ones(min(SMOOTH_WINDOWS, len(counts)))
    smooth: _Floats = np.convolve(np.array(counts, np.float64), kernel, mode="same")
    return smooth


def _dress(axes: Axes, result: ReplayResult, top: float) -> None:
    axes.set_xlim(0, result.requests)
    axes.set_ylim(0, min(1.0, max(0.05, top * 1.12)))
    axes.set_xlabel("request", color=INK)
    axes.set_ylabel("hit ratio (blocks)", color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.grid(axis="y", color="#ffffff", alpha=0.6, linewidth=0.8)
    axes.set_axisbelow(False)
    axes.tick_params(colors=INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.set_title(f"{result.block_hit_ratio:.1%} of blocks handed back", loc="left", color=INK, fontweight="bold")


def _thousands(value: float, _: object) -> str:
    return f"{value:,.0f}"


def _add_time_axis(axes: Axes, result: ReplayResult) -> None:
    """Say at the top when in the trace a request came; left out where the trace gives no times."""
    requests = np.array([0, *(window.end for window in result.series)], np.float64)
    minutes = np.array([0, *(window.timestamp_ms for window in result.series)], np.float64) / 60_000
    if minutes[-1] <= minutes[0]:
        return
    top = axes.secondary_xaxis("top", functions=(_along(requests, minutes), _along(minutes, requests)))
    top.set_xlabel("trace time, minutes", color=FAINT, fontsize="small")
    top.tick_params(colors=FAINT, length=3, labelsize="small")
    top.spines["top"].set_visible(False)


def _along(given: _Floats, wanted: _Floats) -> Callable[[npt.ArrayLike], npt.ArrayLike]:
    """Return the function that takes ``given`` to ``wanted``, straight in between."""

    def at(values: npt.ArrayLike) -> npt.ArrayLike:
        return np.interp(np.asarray(values, np.float64), given, wanted)

    return at
