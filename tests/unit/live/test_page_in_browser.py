"""The live page in a real browser: its figures are those of the metrics, it is for everybody, and it does not grow."""

import asyncio
from pathlib import Path

import pytest

from tests.support.accessibility import check_usable_by_everybody
from tests.support.browser import BrowserTab, browser_tab, needs_browser
from tests.support.certificates import Authority
from tests.support.cluster import ask
from tests.support.live import running_replay
from tests.support.running_service import running
from unified_cache.observe.live.page import LivePage

pytestmark = needs_browser

HOSTILE = "<img src=x onerror=alert(1)>"
"""Name that tries to be more than that."""
IS_LIVE = "document.getElementById('state').dataset.state == 'live'"
POLL_NOW = "poll()"
DIFFERENCES = """(() => {
  const expected = [...polls[polls.length - 1].families].flatMap(([name, family]) =>
    kept(family).map((each) => shown(name, each.value)));
  const cells = [...document.querySelectorAll("#cards td")].map((cell) => cell.firstChild.textContent);
  return [JSON.stringify(cells) == JSON.stringify(expected), cells.length];
})()"""
"""Whether the cells on the page are the samples that were read last, and how many there are."""


async def polled(tab: BrowserTab, times: int) -> None:
    for _ in range(times):
        await tab.evaluate(POLL_NOW)


def test_the_page_shows_every_figure_of_the_metrics_while_a_replay_runs_and_is_for_everybody(tmp_path: Path) -> None:
    async def look(page: LivePage) -> None:
        async with browser_tab() as tab:
            await tab.visit(page.url)
            await tab.wait_for(IS_LIVE)
            await polled(tab, 3)
            is_equal, rows = await tab.evaluate(DIFFERENCES)
            assert is_equal
            assert rows > 20
            says = await tab.evaluate("[...document.querySelectorAll('.card .says')].every((each) => each.textContent)")
            assert says, "each card says what it counts, and over which time"
            await tab.wait_for("document.querySelector('#tiles b').textContent.endsWith('%')")  # once some were served
            assert HOSTILE in await tab.evaluate("document.getElementById('bars').textContent")
            assert await tab.evaluate("document.querySelectorAll('main img').length") == 0
            await check_usable_by_everybody(tab)
            await tab.picture(tmp_path / "page.png")
            outside = (
                "performance.getEntriesByType('resource').filter((each) => !each.name.startsWith(location.origin))"
            )
            assert await tab.evaluate(f"{outside}.length") == 0
            assert tab.logged == []
            page.close()
            await tab.evaluate(POLL_NOW)
            assert "Cannot read the figures since" in await tab.evaluate("document.getElementById('state').textContent")

    with running_replay() as replay, LivePage.start(replay, name=HOSTILE) as page:
        asyncio.run(look(page))


@pytest.mark.threat("reading metrics")
def test_an_administrator_signs_in_to_a_service_over_tls_with_a_token(tmp_path: Path) -> None:
    authority, tokens = Authority("ours"), tmp_path / "tokens"
    certificate, key = authority.issue("server").write(tmp_path, "server")
    admin, reader = (
        ask("token", "new", "--tokens", tokens, "--tenant", "acme", "--role", role).out.strip()
        for role in ("admin", "reader")
    )
    tls = {"certificate": str(certificate), "key": str(key)}
    metrics = {"listen": "0.0.0.0:0"}

    async def look(port: int) -> None:
        async with browser_tab() as tab:
            await tab.ask("Security.setIgnoreCertificateErrors", ignore=True)
            await tab.visit(f"https://127.0.0.1:{port}/")
            assert await tab.evaluate("document.getElementById('tiles')") is None
            await tab.visit(f"https://me:{admin}@127.0.0.1:{port}/")
            await tab.wait_for(IS_LIVE)
            assert "breaker closed" in await tab.evaluate("document.getElementById('tiles').textContent")
        async with browser_tab() as tab:
            await tab.ask("Security.setIgnoreCertificateErrors", ignore=True)
            await tab.visit(f"https://me:{reader}@127.0.0.1:{port}/")
            assert "not for you" in await tab.evaluate("document.body.textContent")

    with running(tls=tls, metrics=metrics, access={"tokens": str(tokens)}) as server:
        assert server.service.metrics_port is not None
        asyncio.run(look(server.service.metrics_port))


def test_a_page_that_is_left_open_does_not_grow() -> None:
    async def held(tab: BrowserTab, polls: int) -> tuple[int, int]:
        await polled(tab, polls)
        return min([await tab.heap_bytes() for _ in range(5)]), int((await tab.counts())["JSEventListeners"])

    async def look(page: LivePage) -> None:
        async with browser_tab() as tab:
            await tab.visit(page.url)
            await tab.wait_for(IS_LIVE)
            await tab.evaluate("globalThis.setTimeout = () => 0")  # polls come from here alone
            # A minute's polls at once, as if they had come in time, and a full line of ratios.
            await tab.evaluate("ratios = Array.from({ length: RATIOS_MAX }, () => 0.5)")
            cut = "polls = polls.slice(-SPAN_S / 2)"
            await polled(tab, 30)
            first = await held(tab, 30)
            for _ in range(5):
                await tab.evaluate(cut)
                last = await held(tab, 30)
            assert last[1] == first[1], "listeners"
            assert last[0] < 2 * first[0], "bytes"

    with running_replay() as replay, LivePage.start(replay) as page:
        asyncio.run(look(page))
