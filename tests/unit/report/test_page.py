"""Pages: what they say, and that nothing in a result can become code."""

import json
import re
from dataclasses import replace
from html import unescape

from tests.support.operations import present
from unified_cache.sizing.report.charts import BandChart, BarChart, Series
from unified_cache.sizing.report.html import html_of
from unified_cache.sizing.report.page import Page, TableSection

HOSTILE = "</script><script>alert(1)</script>"
BANDS = BandChart(
    "Hits over the run",
    "request",
    [0, 5, 10],
    (),
    [Series("device", [0.1, 0.2, 0.1]), Series("host", [0.2, 0.1, 0.3])],
    Series("asked for before", [0.4, 0.4, 0.5]),
)
SIZES = replace(BANDS, position_name="host memory", position_labels=["0 B", "1 GiB", "20 GiB"], marked=[1, 2])
BARS = BarChart("Pages", "count", ["first", HOSTILE], [Series("host", [3, 0])])


def page() -> Page:
    return Page(
        title=f"Replay of {HOSTILE}",
        headline="36.64% of the tokens asked for were handed back.",
        lead="10 requests.",
        alarm="",
        charts=[BANDS, BARS, SIZES],
        tables=[TableSection("By tier", ("tier", "pages"), [("device", "1,000"), ("all", "1,000")], has_total=True)],
        notes=["No payload moved."],
        settings=[("model", HOSTILE), ("a long value", "x" * 300)],
    )


def test_a_page_holds_its_figures_and_asks_for_nothing_from_elsewhere() -> None:
    text = html_of(page())
    found = present(re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL))
    bands, bars, sizes = json.loads(found[1])
    assert bands["bands"][1] == {"name": "host", "values": [0.2, 0.1, 0.3]}
    assert (bars["kind"], bars["unit"], bars["parts"][0]["values"]) == ("bars", "count", [3, 0])
    assert (bands["position_labels"], bands["marked"]) == ([], [])
    assert (sizes["position_labels"], sizes["marked"]) == (["0 B", "1 GiB", "20 GiB"], [1, 2])
    assert not re.search(
        r"""(src|href)\s*=\s*["']|@import|url\(""", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    )


def test_nothing_that_a_result_says_becomes_code() -> None:
    text = html_of(page())
    assert "alert(1)</script>" not in text
    assert unescape(text).count(HOSTILE) == 3  # title, subject, setting; in the chart its angle brackets are escapes


def test_what_is_wrong_stands_at_the_top() -> None:
    assert 'role="alert"' not in html_of(page())
    wrong = html_of(Page("t", "headline", "lead", "2 pages held wrong bytes", [], [], [], []))
    assert '<p class="alarm" role="alert">2 pages held wrong bytes</p>' in wrong
