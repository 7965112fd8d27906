"""The live page in a real browser: its figures are those of the cache, it is for everybody, and it does not grow."""

import asyncio
import json

import pytest

from tests.support.accessibility import check_usable_by_everybody
from tests.support.browser import BrowserTab, browser_tab, needs_browser
from tests.support.live import RunningReplay, running_replay
from unified_cache.observe.live.cache_figures import figures_of
from unified_cache.observe.live.page import LivePage

pytestmark = needs_browser

TOKEN = "a token that is long enough"
SHOWN = """(() => {
  const shown = {};
  for (const node of document.querySelectorAll("[data-figure]"))
    shown[node.dataset.figure] = [node.dataset.exact, node.textContent];
  return { at: Number(document.getElementById("moment").dataset.countedAt), shown };
})()"""
UPDATES = "Number(document.documentElement?.dataset.updates)"
FILL_HISTORY = """(() => {
  const [at, ...totals] = points[0];
  const missing = Array.from({ length: POINTS_MAX - points.length }, (_, number) => number + 1).reverse();
  points = JSON.parse(JSON.stringify([...missing.map((ago) => [at - ago, ...totals]), ...points]));
})()"""
"""Puts the points of a page's last ten minutes before those that it has, in the form in which they come."""

IS_FULL = "points.length == POINTS_MAX"
SAMPLES = 8
"""Moments at which a page is held against the statistics."""

UPDATES_COUNT = 300
"""Updates between two looks at what a page holds; the long test has 6,000, ten minutes of ten a second."""

NODES_GROWTH_MAX = 1_000
"""Nodes that may be more after those, let go and not collected yet; each update changes some 50 texts."""

HEAP_GROWTH_BYTES = 200_000
"""Most that a page may hold more after those: rounding of what a browser counts."""

HEAP_READINGS = 5
"""Of which the least counts: an update that comes between the collection of garbage and a reading is garbage, too."""

HOSTILE = "<img src=x onerror=alert(1)> of 96 pages"
"""Text that tries to be more than that."""


def expected_of(replay: RunningReplay, at_s: float) -> dict[str, int]:
    """Return what a page must show of the statistics of one moment, by the names of its figures."""
    stats = replay.given[at_s]
    figures = figures_of("", stats)
    expected: dict[str, int] = {}
    for held in stats.occupancy:
        component = f"{held.tier.name.lower()}.{held.component}"
        expected |= {
            f"{component}.capacity": held.capacity,
            f"{component}.pinned": held.protected,
            f"{component}.evictable": held.evictable,
            f"{component}.in_flight": held.out,
            f"{component}.free": held.free,
            f"{component}.evicted": held.evicted,
        }
    expected |= {
        "found.lookups": stats.lookups.count,
        "found.device": stats.lookups.device_pages,
        "found.host": stats.lookups.host_pages,
        "found.missed": stats.lookups.missed_pages,
        "found.prefetched": figures.found.prefetched,
    }
    for kind, moved in stats.traffic.items():
        expected |= {f"links.{kind.value}.pages": moved.pages, f"links.{kind.value}.bytes": moved.payload_bytes}
    for (method, answer), count in stats.storage_answers.items():
        expected[f"store.{method.value}.{answer.value}"] = count
    for each in figures.operations:
        for name, value in each._asdict().items():
            if isinstance(value, int):
                expected[f"operations.{each.kind}.{name}"] = value
    return expected


async def shown_by(tab: BrowserTab) -> tuple[float, dict[str, list[str]]]:
    found = await tab.evaluate(SHOWN)
    return found["at"], found["shown"]


def test_the_numbers_on_the_page_are_those_of_the_cache_while_a_replay_runs() -> None:
    async def look(replay: RunningReplay) -> None:
        with LivePage.start(replay, name="replay", every_s=0.02) as page:
            async with browser_tab() as tab:
                await tab.visit(page.url)
                await tab.wait_for(f"{UPDATES} > 0")
                moments: set[float] = set()
                while len(moments) < SAMPLES:
                    at_s, shown = await shown_by(tab)
                    expected = expected_of(replay, at_s)
                    exact = {name: value for name, (value, _) in shown.items() if not name.endswith(".used")}
                    assert exact == {name: str(value) for name, value in expected.items()}
                    texts = {name: text for name, (_, text) in shown.items() if not name.endswith((".used", ".bytes"))}
                    assert texts == {name: f"{expected[name]:,}" for name in texts}
                    moments.add(at_s)
                    await tab.wait_for(f"document.getElementById('moment').dataset.countedAt != {json.dumps(at_s)}")
                assert tab.logged == []

    with running_replay() as replay:
        asyncio.run(look(replay))
        assert replay.served_count > SAMPLES


def test_everybody_can_use_the_page_at_any_width_in_light_and_dark() -> None:
    async def look(replay: RunningReplay) -> None:
        with LivePage.start(replay, name=HOSTILE, every_s=0.1) as page:
            async with browser_tab() as tab:
                await tab.visit(page.url)
                await tab.wait_for(f"{UPDATES} > 0")
                await check_usable_by_everybody(tab)
                assert await tab.evaluate("document.querySelectorAll('img').length") == 0
                assert "onerror" in await tab.evaluate("document.body.textContent")
                outside = (
                    "performance.getEntriesByType('resource').filter((each) => !each.name.startsWith(location.origin))"
                )
                assert await tab.evaluate(f"{outside}.length") == 0

    with running_replay() as replay:
        asyncio.run(look(replay))


def test_signed_in_keys_alone_pause_the_page_and_look_at_a_moment() -> None:
    async def look(replay: RunningReplay) -> None:
        with LivePage.start(replay, token=TOKEN, every_s=0.05) as page:
            async with browser_tab() as tab:
                await tab.visit(page.url)
                assert "a valid token is needed" in await tab.evaluate("document.body.textContent")
                await tab.ask("Network.enable")
                signed_in = {"Authorization": f"Bearer {TOKEN}"}
                await tab.ask("Network.setExtraHTTPHeaders", headers=signed_in)
                await tab.visit(page.url)
                await tab.wait_for(f"{UPDATES} > 2")
                await tab.wait_for("Number(document.getElementById('look').max) > 1")
                while await tab.evaluate("document.activeElement.id") != "pause":
                    await tab.press("Tab")
                await tab.press("Enter")
                assert await tab.evaluate("document.getElementById('state').textContent") == "Paused"
                before = await tab.evaluate(UPDATES)
                while await tab.evaluate("document.activeElement.id") != "look":
                    await tab.press("Tab")
                await tab.press("ArrowLeft")
                said = await tab.evaluate("document.getElementById('look').getAttribute('aria-valuetext')")
                assert "device" in said
                assert await tab.evaluate("document.getElementById('reading').textContent") == said
                assert await tab.evaluate(UPDATES) == before, "a page that is paused stands still"

    with running_replay() as replay:
        asyncio.run(look(replay))


async def held_after(tab: BrowserTab, updates: int) -> tuple[int, int, int]:
    """Wait for so many updates; return bytes of the heap, nodes and listeners then, with a history that is full."""
    await tab.wait_for(f"{UPDATES} >= {updates}", within_s=updates)
    assert await tab.evaluate(IS_FULL)
    heap_bytes = min([await tab.heap_bytes() for _ in range(HEAP_READINGS)])
    counts = await tab.counts()
    return heap_bytes, int(counts["Nodes"]), int(counts["JSEventListeners"])


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    ("updates", "every_s"), [(UPDATES_COUNT, 0.01), pytest.param(20 * UPDATES_COUNT, 0.1, marks=pytest.mark.long)]
)
def test_a_page_that_is_left_open_does_not_grow(updates: int, every_s: float) -> None:
    async def look(replay: RunningReplay) -> None:
        with LivePage.start(replay, every_s=every_s) as page:
            async with browser_tab() as tab:
                await tab.visit(page.url)
                await tab.wait_for("document.querySelectorAll('#slowest tbody tr').length == 8")
                await tab.evaluate(FILL_HISTORY)
                await held_after(tab, updates // 10)
                first = await held_after(tab, updates // 5)
                last = await held_after(tab, updates)
                assert last[2] == first[2], "listeners"
                assert last[1] - first[1] < NODES_GROWTH_MAX, "nodes"
                assert last[0] - first[0] < HEAP_GROWTH_BYTES

    with running_replay() as replay:
        asyncio.run(look(replay))
