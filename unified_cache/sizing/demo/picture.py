"""Results of the demo as a page and as a picture: waits beside computing, and pages by source."""

from importlib.util import find_spec
from pathlib import Path

from unified_cache.core.extras import import_with_extra
from unified_cache.sizing.demo.result import SOURCES, DemoResult, Step
from unified_cache.sizing.report.charts import BarChart, series_of
from unified_cache.sizing.report.page import Page

COLOURS = {"device": "#0072b2", "host": "#56b4e9", "storage": "#e69f00", "computed": "#7b8794", "saved": "#dfe4e9"}
"""Those of the page, in ``page.css``; distinct to all kinds of colour vision."""


def page_of(result: DemoResult) -> Page:
    """Return the page of a demo whose answers have been compared."""
    names = [step.name for step in result.steps]
    waits = [waits_of(step) for step in result.steps]
    page_tokens = result.ready.page_tokens
    pages = [{source: step.answer.prompt_tokens[source] / page_tokens for source in SOURCES} for step in result.steps]
    return Page(
        title=f"Demo: {result.model} reads {result.document}",
        headline=headline(result),
        lead="" if result.findings else f"{result.verdict}.",
        alarm=f"{result.verdict}." if result.findings else "",
        charts=[
            BarChart(
                "Time to first token, beside computing the whole prompt",
                "milliseconds",
                names,
                series_of((*SOURCES, "saved"), waits),
            ),
            BarChart("Pages of the prompt, by source", "count", names, series_of(SOURCES, pages)),
        ],
        tables=[result.table],
        notes=[
            "A bar is as long as computing the whole prompt took without a cache, its coloured part as the wait was.",
            f"The new process was ready {result.restart_s:.1f} s after the kill, with torch and the model loaded; "
            f"waits do not count that.",
            *(f"{step.name}: {step.answer.question} {step.answer.text.strip()}" for step in result.steps[:2]),
        ],
        settings=[
            ("model", result.model),
            ("document", f"{result.document}, {result.ready.document_tokens:,} tokens"),
            ("page", f"{result.ready.page_tokens} tokens, {result.ready.page_bytes:,} bytes"),
            ("storage", result.storage),
            ("computed on", "one thread"),
        ],
    )


def headline(result: DemoResult) -> str:
    """Return one sentence: the wait after the restart."""
    step = next((step for step in result.steps if step.answer.prompt_tokens["storage"]), None)
    if step is None:
        return "Nothing came from storage."
    waits = f"{step.answer.first_token_s:.1f} s instead of {step.computing_s:.1f} s"
    return f"Killed and started again, it answered in {waits}, with {'other' if result.findings else 'the same'} words."


def waits_of(step: Step) -> dict[str, float]:
    """Return the wait for the first token, under its main source, and what is saved of computing it; milliseconds."""
    wait_s = step.answer.first_token_s
    waits = dict.fromkeys(SOURCES, 0.0) | {step.answer.main_source: wait_s * 1e3}
    return waits | {"saved": max(0.0, step.computing_s - wait_s) * 1e3}


def write_picture(page: Page, directory: Path) -> Path | None:
    """Write the bar charts of a page as a PNG; None where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return None
    figure = import_with_extra("matplotlib.figure", "demo", "the picture").Figure((11.0, 5.0), layout="constrained")
    figure.suptitle(page.headline, fontweight="bold")
    charts = [chart for chart in page.charts if isinstance(chart, BarChart)]
    for axes, chart in zip(figure.subplots(1, len(charts), sharey=True), charts, strict=True):
        is_time = chart.unit == "milliseconds"
        left = [0.0] * len(chart.categories)
        for part in chart.parts:
            values = [value / 1e3 if is_time else value for value in part.values]
            bars = axes.barh(chart.categories, values, left=left, color=COLOURS[part.name], label=part.name)
            if is_time and part.name != "saved":
                axes.bar_label(bars, [f" {value:.2f} s" if value else "" for value in values], fontsize=9)
            left = [before + value for before, value in zip(left, values, strict=True)]
        axes.set_xlabel(f"{chart.title}, in seconds" if is_time else chart.title)
        axes.set_xlim(0.0, 1.15 * max(left))
    figure.axes[0].invert_yaxis()
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), frameon=False
    )
    figure.savefig(directory / "demo.png", dpi=150)
    return directory / "demo.png"
