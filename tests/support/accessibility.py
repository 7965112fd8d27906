"""Whether everybody can use a page: what axe-core finds, at two widths, in light and dark."""

import gzip
import json

from tests.sources import ROOT
from tests.support.browser import BrowserTab

AXE = ROOT / "tests" / "support" / "axe-4.10.3.min.js.gz"
"""axe-core, under the Mozilla Public License 2.0."""

WIDTHS = (400, 1600)
"""A telephone's and a desk's, in CSS pixels."""

SCHEMES = ("light", "dark")


async def check_usable_by_everybody(tab: BrowserTab) -> None:
    """Have axe-core find nothing serious in the page that is open, and nothing be wider than the window.

    The page is left dark, at the larger width.
    """
    await tab.evaluate(gzip.decompress(AXE.read_bytes()).decode())
    grounds = set()
    for scheme in SCHEMES:
        await tab.prefer(scheme)
        grounds.add(await tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        for width in WIDTHS:
            await tab.resize(width)
            found = await tab.evaluate("axe.run().then((found) => JSON.stringify(found.violations))")
            serious = [
                (each["id"], [node["html"] for node in each["nodes"]])
                for each in json.loads(found)
                if each["impact"] in ("serious", "critical")
            ]
            assert serious == [], f"{scheme} at {width} px: {serious[:2]}"
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
    assert len(grounds) == len(SCHEMES)
