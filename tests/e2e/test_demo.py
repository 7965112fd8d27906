"""The demo: every answer compared with the one computed cold, on every family; and it finds out a store that lies."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.exactness import FAMILIES
from unified_cache.cli.main import run
from unified_cache.core.seal import HEADER_BYTES, seal_buffers
from unified_cache.sizing.demo.run import DemoSettings, run_demo
from unified_cache.sizing.demo.workload import shown, tokens_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO
from unified_cache.testing.tiny_models import TINY_MODELS


class Forger(MemoryStorage):
    """A store that outlives its engines, and hands back blank pages under seals of its own."""

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        hits = super().get(pages)
        for page, hit in zip(pages, hits, strict=True):
            if hit:
                (buffer,) = page.buffers
                buffer[HEADER_BYTES:] = bytes(len(buffer) - HEADER_BYTES)
                seal_buffers(page.buffers, page.label)
        return hits

    def close(self) -> None:
        """Stay open."""


FORGER = Forger()


def forging(_rest: str, _bytes_max: int | None) -> MemoryStorage:
    return FORGER


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_the_demo_is_what_the_model_says_cold(family: str, tmp_path: Path) -> None:
    told: list[int] = []
    tokens = max(2 * TINY_MODELS[family].page_size, 64)
    settings = DemoSettings(family, f"file:{tmp_path}", users=1, system_tokens=tokens, answer_tokens=4)
    result = run_demo(settings, lambda done, _: told.append(done))
    assert not result.different
    assert told == list(range(1, settings.requests_count + 1))
    assert result.verdict().startswith("all 5 answers are identical")
    cold, *tiers = result.rows
    assert [row.tier for row in tiers] == ["device", "host", "storage"]
    assert cold.computed_tokens == cold.prompt_tokens
    for row in tiers:
        reused = {"device": row.device_tokens, "host": row.host_tokens, "storage": row.storage_tokens}
        assert reused.pop(row.tier) == row.prompt_tokens - row.computed_tokens > 0
        assert not any(reused.values())


def test_the_command_prints_a_conversation_a_table_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, kept = tmp_path / "out", tmp_path / "demo.json"
    assert run(["demo", "--model", "tiny-llama", "--users", "1", "--report", str(out), "--json-file", str(kept)]) == 0
    printed = capsys.readouterr()
    for text in ("> Where do I find a map of the harbour?", "served from", "storage", "all 5 answers are identical"):
        assert text in printed.out
    assert printed.err.splitlines() == [f"report: {out / 'index.html'}"]  # no bar where no terminal is
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "of the time it takes without a cache.</h1>" in page
    assert "All 5 answers are identical" in page
    result = json.loads(kept.read_text(encoding="utf-8"))
    assert result["identical"]
    assert [row["tier"] for row in result["rows"]] == ["nowhere (cold)", "device", "host", "storage"]
    assert len(result["requests"]) == 5


def test_a_store_that_forges_pages_is_found_out(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{forging.__module__}:{forging.__name__}"
    assert run(["demo", "--model", "tiny-llama", "--users", "1", "--storage", url, "--json"]) == 1
    printed = capsys.readouterr()
    assert not json.loads(printed.out)["identical"]
    assert "answers differ from those computed cold" in printed.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--model", "gpt-5"], "a tiny model must be one of"), (["--storage", "nowhere"], "a store is named as")],
)
def test_what_cannot_be_is_refused_in_one_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", *options]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert reason in line


def test_every_byte_has_a_look_of_its_own() -> None:
    assert shown(tokens_of("Where? ")) == "Where? "
    assert len({*shown(list(range(256)))}) == 256
