"""Results of the demo as a page and as a picture: waits beside computing, and pages by where they came from."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from unified_cache.core.extras import import_with_extra
from unified_cache.sizing.demo.result import TIERS, DemoResult, Step
from unified_cache.sizing.report.charts import BarChart, Hue, Series, Unit
from unified_cache.sizing.report.page import Page

__all__ = ["page_of", "write_picture"]

PICTURE_NAME = "demo.png"
COLOURS = {"device": "#0072b2", "host": "#56b4e9", "storage": "#e69f00", "computed": "#7b8794", "saved": "#dfe4e9"}
"""Those of the page, in ``page.css``; distinct to all kinds of colour vision."""
INCHES, DOTS_PER_INCH = (11.0, 5.0), 150


def page_of(result: DemoResult) -> Page:
    """Return the page of a demo."""
    names = [step.name for step in result.steps]
    hues = {tier: Hue.PLAIN if tier == "computed" else Hue(tier) for tier in TIERS}
    waits = [Series(f"wait, from {tier}", hues[tier], waits_ms(result.steps, tier)) for tier in TIERS]
    saved = Series("not waited", Hue.REST, [saved_ms(step) for step in result.steps])
    pages = [Series(tier, hues[tier], pages_from(result, tier)) for tier in TIERS]
    return Page(
        title=f"Demo: {result.model} reads {result.document}",
        headline=headline(result),
        lead="" if result.findings else f"{result.verdict}.",
        alarm=f"{result.verdict}." if result.findings else "",
        charts=[
            BarChart(
                "Time to first token, beside computing the whole prompt", Unit.MILLISECONDS, names, [*waits, saved]
            ),
            BarChart("Pages of the prompt, by where they came from", Unit.COUNT, names, pages),
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
    step = next((step for step in result.steps if step.answer.storage_tokens and step.reference is not None), None)
    if step is None or step.reference is None:
        return "Nothing came from storage."
    waits = f"{step.answer.first_token_s:.1f} s instead of {step.reference.first_token_s:.1f} s"
    return f"Killed and started again, it answered in {waits}, with {'other' if result.findings else 'the same'} words."


def write_picture(result: DemoResult, directory: Path) -> Path | None:
    """Write the two charts of the page as a PNG; None where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return None
    figure = import_with_extra("matplotlib.figure", "demo", "the picture").Figure(INCHES, layout="constrained")
    figure.suptitle(headline(result), fontweight="bold")
    waits, pages = figure.subplots(1, 2, sharey=True)
    names = [step.name for step in result.steps]

    def draw(parts: dict[str, list[float]], bar: Callable[..., object]) -> None:
        left = [0.0] * len(names)
        for part, values in parts.items():
            bar(names, values, left=left, color=COLOURS[part], label=part)
            left = [before + value for before, value in zip(left, values, strict=True)]

    seconds = {tier: [each / 1e3 for each in waits_ms(result.steps, tier)] for tier in TIERS}
    draw({**seconds, "saved": [saved_ms(step) / 1e3 for step in result.steps]}, waits.barh)
    draw({tier: pages_from(result, tier) for tier in TIERS}, pages.barh)
    for step, name in zip(result.steps, names, strict=True):
        waits.text(step.answer.first_token_s, name, f" {step.answer.first_token_s:.2f} s", va="center", fontsize=9)
    waits.set_xlabel("seconds to the first token (whole bar: computing the prompt)")
    pages.set_xlabel("pages of the prompt")
    longest_s = max((step.reference or step.answer).first_token_s for step in result.steps)
    waits.set_xlim(0.0, 1.15 * max(longest_s, *(step.answer.first_token_s for step in result.steps)))
    waits.invert_yaxis()
    figure.legend(*waits.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), frameon=False)
    figure.savefig(directory / PICTURE_NAME, dpi=DOTS_PER_INCH)
    return directory / PICTURE_NAME


def waits_ms(steps: Sequence[Step], tier: str) -> list[float]:
    """Return the wait of each step whose prompt came from ``tier`` for the most part, and 0 for the others."""
    return [step.answer.first_token_s * 1e3 if step.answer.main_tier == tier else 0.0 for step in steps]


def saved_ms(step: Step) -> float:
    """Return how much longer computing the whole prompt takes."""
    computing_s = 0.0 if step.reference is None else step.reference.first_token_s
    return max(0.0, computing_s - step.answer.first_token_s) * 1e3


def pages_from(result: DemoResult, tier: str) -> list[float]:
    """Return the pages of each step's prompt that came from ``tier``."""
    return [step.answer.tokens_from(tier) / result.ready.page_tokens for step in result.steps]
