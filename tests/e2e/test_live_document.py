"""The guide to the live page: its program runs."""

import urllib.request

import pytest

from tests.sources import ROOT
from tests.support.documents import code_blocks
from unified_cache.observe.live.page import LivePage

GUIDE = (ROOT / "docs" / "live.md").read_text(encoding="utf-8")
START_S = 60.0
STORE = "file:/var/cache/kv"


def figures(page: str) -> str:
    with urllib.request.urlopen(f"{page}metrics", timeout=START_S) as answer:
        return str(answer.read().decode())


def test_the_program_of_the_guide_serves_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = (block.text for block in code_blocks(GUIDE) if block.language == "python")
    names: dict[str, object] = {}
    exec(compile(program, "docs/live.md", "exec"), names)
    page = names["page"]
    assert isinstance(page, LivePage)
    with page:
        assert page.url in capsys.readouterr().out
        assert 'tier="device"} 64.0' in figures(page.url)
