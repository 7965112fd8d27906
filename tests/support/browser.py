"""A real browser, driven over its DevTools protocol: open pages, ask them, look at them."""

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser: chromium is not installed")

ANSWER_S = 60.0
"""Longest wait for an answer of the browser; reached only by a bug."""

LOOK_S = 0.02
"""Between two looks for what a page is to show."""

PAGE_LEFT = ("navigated", "Cannot find context", "context was destroyed")
"""Words of the browser where a page is no more that was to evaluate something."""

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
)


class PageLeftError(AssertionError):
    """The page that was asked has given way to another one before it answered."""


class BrowserTab:
    """One page in a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.session = ""
        self.logged: list[str] = []
        """What the page has written to its console, and what the browser says against it."""

    async def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        """Make one call of the protocol; return its result."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        await self._socket.send_str(json.dumps(message))
        while True:
            answer = json.loads((await self._socket.receive(ANSWER_S)).data)
            if answer.get("id") == number:
                refusal = answer.get("error")
                if refusal is not None and any(words in refusal["message"] for words in PAGE_LEFT):
                    raise PageLeftError(f"{method}: {refusal}")
                assert refusal is None, f"{method}: {refusal}"
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("params", {}).get("entry", {}).get("level") == "verbose":
                continue  # advice to authors, nothing that went wrong
            if answer.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.logged.append(json.dumps(answer["params"]))

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        result = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_for(self, expression: str, within_s: float = ANSWER_S) -> None:
        """Wait until an expression holds in the page, or in the one that it gives way to."""
        # Between two pages there may be no document: then it does not hold yet.
        attempt = f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"
        async with asyncio.timeout(within_s):
            while True:
                with suppress(PageLeftError):
                    if await self.evaluate(attempt):
                        return
                await asyncio.sleep(LOOK_S)

    async def visit(self, url: str) -> None:
        """Open an address, and wait until the page has been read."""
        await self.ask("Page.navigate", url=url)
        await self.wait_for("location.href != 'about:blank' && document.readyState == 'complete'")

    async def resize(self, width: int, height: int = 900) -> None:
        """Give the page a window of this size."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def prefer(self, scheme: str) -> None:
        """Have the reader prefer light or dark."""
        await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> None:
        """Write a picture of the page."""
        taken = await self.ask("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(taken["data"]))

    async def heap_bytes(self) -> int:
        """Return the bytes that the page's programs hold once garbage is collected."""
        await self.ask("HeapProfiler.collectGarbage")
        return int((await self.ask("Runtime.getHeapUsage"))["usedSize"])

    async def counts(self) -> dict[str, float]:
        """Return what the browser counts of the page, such as its nodes and listeners."""
        metrics = (await self.ask("Performance.getMetrics"))["metrics"]
        return {each["name"]: each["value"] for each in metrics}


@asynccontextmanager
async def browser_tab() -> AsyncIterator[BrowserTab]:
    """Start a browser with a profile of its own and an empty page; end it with the block."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            BROWSER,
            *OPTIONS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            address = await asyncio.wait_for(_address(browser), ANSWER_S)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
            ):
                tab = BrowserTab(socket)
                target = (await tab.ask("Target.createTarget", url="about:blank"))["targetId"]
                attached = await tab.ask("Target.attachToTarget", targetId=target, flatten=True)
                tab.session = attached["sessionId"]
                for room in ("Page", "Runtime", "Log", "Performance", "HeapProfiler"):
                    await tab.ask(f"{room}.enable")
                yield tab
        finally:
            browser.kill()
            await browser.wait()


async def _address(browser: asyncio.subprocess.Process) -> str:
    """Read where a browser that has just started can be reached."""
    assert browser.stderr is not None
    async for line in browser.stderr:
        text = line.decode(errors="replace")
        if "DevTools listening on " in text:
            return text.split("DevTools listening on ", 1)[1].strip()
    raise AssertionError("the browser ended before it could be reached")
