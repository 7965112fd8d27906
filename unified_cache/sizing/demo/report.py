"""A demo as a page: time to first token and computed tokens, by the tier that a prompt was served from."""

from unified_cache.sizing.demo.result import DemoResult
from unified_cache.sizing.report.charts import BarChart, Hue, Series, Unit
from unified_cache.sizing.report.page import Page, TableSection

__all__ = ["page_of"]


def page_of(result: DemoResult) -> Page:
    """Return what the page of a demo says."""
    tiers = [row.tier for row in result.rows]
    times_ms = [row.first_token_s * 1e3 for row in result.rows]
    return Page(
        title=f"Demo: conversations with {result.model}",
        headline=_headline(result),
        lead="" if result.different else f"{result.verdict().capitalize()}.",
        alarm=f"{result.verdict().capitalize()}." if result.different else "",
        charts=[
            BarChart("Time to first token", Unit.MILLISECONDS, tiers, [Series("median", Hue.PLAIN, times_ms)]),
            BarChart(
                "Tokens of the prompt, by where they came from",
                Unit.COUNT,
                tiers,
                [
                    Series("device", Hue.DEVICE, [row.device_tokens for row in result.rows]),
                    Series("host", Hue.HOST, [row.host_tokens for row in result.rows]),
                    Series("storage", Hue.STORAGE, [row.storage_tokens for row in result.rows]),
                    Series("computed", Hue.PLAIN, [row.computed_tokens for row in result.rows]),
                ],
            ),
        ],
        tables=[TableSection("By tier", result.columns, [row.cells() for row in result.rows])],
        notes=["Tokens are means, times medians.", f"Forwards: {result.forwards_text()}."],
        settings=[("model", result.model), ("storage", result.storage)],
    )


def _headline(result: DemoResult) -> str:
    """Return what the tiers saved, against computing the same prompts."""
    shares = [f"{row.first_token_s / row.cold_first_token_s:.0%} from {row.tier}" for row in result.rows[1:]]
    if not shares:
        return "No prompt was served from any tier."
    *others, last = shares
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"The first token took {listed} of the time it takes without a cache."
