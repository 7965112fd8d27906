"""Pages of reports in a real browser: whole and for everybody, at a telephone's width and a desk's, light and dark."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.test_demo import STEPS
from tests.sources import ROOT
from tests.support.accessibility import WIDTHS, check_usable_by_everybody
from tests.support.browser import BrowserTab, browser_tab, needs_browser
from tests.support.cluster import ask
from unified_cache.cli.report_page import page_writer
from unified_cache.sizing.demo.picture import page_of
from unified_cache.sizing.demo.result import SOURCES, DemoAnswer, DemoResult, Ready, Step

pytestmark = needs_browser

TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"
COMMANDS = {
    "plan": ("plan", TRACE, "--limit", "200", "--model", "deepseek-v4-flash", "--devices", "8"),
    "replay": (
        *("replay", TRACE, "--limit", "200", "--model", "deepseek-v4-flash", "--no-bytes", "--explain"),
        *("--device-bytes", "1GiB", "--host-bytes", "4GiB", "--engines", "2", "--storage", "memory:"),
    ),
}
DRAWN = "[...document.querySelectorAll('[data-chart]')].every((each) => each.dataset.isDrawn == 'true')"
CUT_NAMES = """[...document.querySelectorAll("[data-chart] canvas")].map((canvas) => Chart.getChart(canvas))
  .filter((chart) => chart.options.indexAxis == "y").flatMap(({ ctx, scales }) => {
    ctx.font = `${Chart.defaults.font.size}px ${Chart.defaults.font.family}`;
    return scales.y.ticks.flatMap((tick) => tick.label).filter((line) => ctx.measureText(line).width > scales.y.width);
  })"""
"""Lines of the names beside bars that are wider than the room for them."""

SAID = """[...document.querySelectorAll("[data-chart]")].map((section) => {
  section.querySelector("canvas").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  return section.querySelector(".reading").textContent;
})"""


@pytest.mark.parametrize("command", COMMANDS)
def test_everybody_can_read_a_report_at_any_width_in_light_and_dark(tmp_path: Path, command: str) -> None:
    said = ask(*COMMANDS[command], "--report", tmp_path)
    assert said.status == 0, said.err
    asyncio.run(look_at(tmp_path / "index.html"))


def test_everybody_can_read_the_page_of_a_demo(tmp_path: Path) -> None:
    sources = ("computed", "device", "host", "storage", "device", "storage", "computed")
    steps = []
    for name, source in zip(STEPS, sources, strict=True):
        prompt_tokens = {**dict.fromkeys(SOURCES, 0), source: 300}
        flawed_pages = int(name == "byte flipped")
        answer = DemoAnswer("What is it?", "a cache", [1, 2], "aa", 0.3, prompt_tokens, flawed_pages)
        steps.append(Step(name, answer))
    result = DemoResult(Ready(288, 32, 1 << 20, "00"), "tiny-llama", "file", "novel.txt", tuple(steps), 2.5, "a page")
    page_writer(tmp_path)(page_of(result.with_references([replace(steps[0].answer, first_token_s=2.0)])))
    asyncio.run(look_at(tmp_path / "index.html"))


async def look_at(page: Path) -> None:
    async with browser_tab() as tab:
        await tab.visit(page.as_uri())
        await tab.wait_for(DRAWN)
        await check_usable_by_everybody(tab)
        for width in WIDTHS:
            await check_charts(tab, width)
        assert tab.logged == []


async def check_charts(tab: BrowserTab, width: int) -> None:
    """Have every chart of a page as wide as its column, with whole names, and said in words for who moves along it."""
    await tab.resize(width)
    await tab.wait_for("[...document.querySelectorAll('canvas')].every((each) => each.clientWidth <= innerWidth)")
    assert await tab.evaluate(CUT_NAMES) == [], f"at {width} px"
    readings = await tab.evaluate(SAID)
    assert readings
    assert all(": " in reading for reading in readings)
