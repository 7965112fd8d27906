"""``unified-cache explain`` over a store alone: what it holds of a prompt, and under which other name."""

import json
from pathlib import Path

import pytest

from tests.support.cluster import ask, ask_apart
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill
from unified_cache.core.page import Namespace, Prompt
from unified_cache.storage_backends.url import open_storage

TOKENS = list(range(PAGES * PAGE_SIZE))


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"file:{tmp_path / 'kept'}"
    fill(open_storage(url), LAYOUTS["full_swa"], [Prompt.of(TOKENS, PAGE_SIZE, whole=True)])
    (tmp_path / "prompts").write_text(json.dumps([*TOKENS, *range(5_000, 5_000 + 2 * PAGE_SIZE)]), encoding="utf-8")
    return url


def test_a_store_alone_is_explained_without_torch(store: str, tmp_path: Path) -> None:
    said = ask_apart("explain", "--storage", store, "--tokens", tmp_path / "prompts")
    assert said.status == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == f"prompt 1: {PAGES} pages of {PAGES + 2} can be resumed ({PAGE_SIZE} tokens each)"
    assert f"[{PAGES}, {PAGES + 2}) not in the store" in lines[2]
    assert lines[3].split("|")[1].count("=") == 2, "the window of the end"


def test_a_prompt_of_another_namespace_is_told_of_the_same_tokens_without_one(store: str, tmp_path: Path) -> None:
    said = ask("explain", "--storage", store, "--tokens", tmp_path / "prompts", "--cache-salt", "s", "--json")
    (prompt,) = json.loads(said.out)["prompts"]
    assert prompt["end"] == 0
    assert prompt["near"] == [{"place": "storage", "pages": PAGES, "differs": ["cache_salt"]}]
    assert [loss["why"] for loss in prompt["losses"]] == ["not_in_store"]


def test_a_prompt_of_the_tenant_it_was_stored_for_has_no_near_match(tmp_path: Path, store: str) -> None:
    fill(open_storage(store), LAYOUTS["full_swa"], [Prompt.of(TOKENS, PAGE_SIZE, Namespace(tenant="acme"), whole=True)])
    said = ask("explain", "--storage", store, "--tokens", tmp_path / "prompts", "--tenant", "acme", "--json")
    (prompt,) = json.loads(said.out)["prompts"]
    assert (prompt["end"], prompt["near"]) == (PAGES, [])
