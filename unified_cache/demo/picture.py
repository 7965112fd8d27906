"""Picture of a demo: time to first token and computed tokens, by the tier that a prompt was served from.

Needs the extra ``report``.
"""

import io

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unified_cache.demo.result import DemoResult

__all__ = ["PICTURE_NAME", "draw"]

PICTURE_NAME = "ttft.png"

COLOURS = {"device": "#0072B2", "host": "#56B4E9", "storage": "#E69F00"}
"""Told apart by all kinds of colour vision, and by lightness in print; from Okabe and Ito, 2008."""
COLD = "#7b8794"
INK = "#1f2933"


def draw(result: DemoResult) -> bytes:
    """Draw two rows of bars, a bar for cold and one for each tier; return a PNG."""
    figure = Figure(figsize=(9, 3.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    times, tokens = figure.subplots(1, 2, sharey=True)
    rows = result.rows[::-1]
    names = [row.tier for row in rows]
    colours = [COLOURS.get(row.tier, COLD) for row in rows]
    _bars(times, names, colours, [row.first_token_s * 1e3 for row in rows], "{:.0f} ms")
    times.set_title("time to first token", loc="left", color=INK, fontweight="bold")
    _bars(tokens, names, colours, [row.computed_tokens for row in rows], "{:.0f}")
    tokens.set_title("tokens of the prompt computed", loc="left", color=INK, fontweight="bold")
    figure.supxlabel(f"{result.model}: {result.verdict()}", color=INK, fontsize="small", x=0.01, ha="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _bars(axes: Axes, names: list[str], colours: list[str], values: list[float], label: str) -> None:
    bars = axes.barh(names, values, color=colours, height=0.62)
    axes.bar_label(bars, [label.format(value) for value in values], padding=4, color=INK)
    axes.set_xlim(0, max(values) * 1.18)
    axes.set_xticks([])
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(COLD)
