"""Models of transformers resume bit by bit from pages, and are laid out as they keep their state."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.stock_models import Resume, StockModel, causal_model_types, try_model
from unified_cache.components.layouts import SizedLayout, size_hf_config
from unified_cache.core.errors import LayoutError
from unified_cache.integrations.transformers import KeptState

LISTS = ROOT / "docs" / "layouts.md"

SOME = (
    "cohere2",
    "falcon_h1",
    "gemma4_text",
    "glm_moe_dsa",
    "gpt2",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "mamba2",
    "minimax_m3_vl_text",
)
"""One of each kind of state, and of each way to say which layers have it, beside the families of tiny models."""

LATENT = frozenset(
    [
        "axk1",
        "axk2",
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots3_note",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_linear",
        "longcat_flash",
        "minicpm3",
        "youtu",
    ]
)
"""Models whose cache object has keys and values of all heads, where engines keep one latent row."""

COMPRESSED = frozenset({"deepseek_v4"})
"""Models whose rows have a format of the engines' own."""


def listed(marker: str, text: str) -> set[str]:
    """Return the names that a document lists between two comments."""
    found = re.search(rf"<!-- {marker} -->(.*?)<!-- /{marker} -->", text, re.DOTALL)
    assert found is not None, marker
    return set(re.findall(r"`([^`]+)`", found.group(1)))


def rows(sized: SizedLayout) -> Mapping[str, int]:
    """Return bytes by pool of what attention keeps; the state of recurrent layers has another shape in engines."""
    return {pool.name: pool.page_bytes for pool in sized.layout.pools if pool.page_bytes and pool.name != "mamba"}


def disagreement(tried: StockModel, tmp_path: Path) -> str | None:
    """Say in what the layout of a model's ``config.json`` differs from what the model keeps; None if in nothing.

    A layout is made without any code of transformers; the bytes are those that the model itself has in memory.
    """
    kept = tried.kept
    assert isinstance(kept, KeptState)
    config = kept.model.config
    config.dtype = kept.strands[0].dtype
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    is_latent = tried.model_type in LATENT | COMPRESSED
    try:
        sized = size_hf_config(fields, page_size=None if is_latent else kept.layout.page_size)
    except LayoutError as error:
        return f"refused: {error}"
    if is_latent:
        pools = {strand.pool for strand in kept.strands} & {"kv", "swa"}
        said = {pool for pool, count in sized.layers.items() if count} & {"kv", "swa"}
        return None if pools == said or "kv" in said else f"pools {sorted(pools)}, found {sorted(said)}"
    live = {pool.name: pool.page_bytes for pool in kept.layout.pools if pool.page_bytes and pool.name != "mamba"}
    if sized.notes and sum(rows(sized).values()) == sum(live.values()):
        return None  # where nobody says which layers have the window, all are kept as full
    if rows(sized) != live:
        return f"kept {live}, laid out {dict(rows(sized))}"
    placed = Counter(pool for pool, _ in {(each.pool, each.layer) for each in kept.strands if each.pool != "mamba"})
    laid_out = {pool: count for pool, count in sized.layers.items() if count and pool != "mamba"}
    return None if laid_out == placed else f"layers {dict(placed)}, laid out {laid_out}"


@pytest.mark.parametrize("model_type", SOME)
def test_a_stock_model_resumes_bit_by_bit_and_is_laid_out_as_it_keeps_its_state(
    model_type: str, tmp_path: Path
) -> None:
    tried = try_model(model_type)
    assert (tried.resume, tried.reason) == (Resume.EXACT, "")
    if model_type != "minimax_m3_vl_text":  # its index is in no engine's pool that we know the format of
        assert disagreement(tried, tmp_path) is None


def test_the_readme_names_the_number_of_models_that_resume() -> None:
    exact = listed("exact", LISTS.read_text(encoding="utf-8"))
    named = re.search(
        r"(\d+) of the \d+ causal language models of transformers", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert named is not None
    assert int(named.group(1)) == len(exact)
    assert set(SOME) <= exact


@pytest.mark.long
def test_the_models_that_resume_and_those_that_do_not_are_the_ones_that_are_listed() -> None:
    tried = [try_model(model_type) for model_type in causal_model_types()]
    text = LISTS.read_text(encoding="utf-8")
    assert not [each for each in tried if each.resume is Resume.INEXACT]
    assert {each.model_type for each in tried if each.resume is Resume.EXACT} == listed("exact", text)
    assert {each.model_type for each in tried if each.resume is Resume.REFUSED} == listed("refused", text)
    assert {each.model_type for each in tried if each.resume is Resume.NOT_BUILT} == listed("not built", text)


@pytest.mark.long
def test_every_model_that_resumes_and_is_laid_out_is_laid_out_as_it_keeps_its_state(tmp_path: Path) -> None:
    differing: dict[str, str] = {}
    for model_type in sorted(listed("exact", LISTS.read_text(encoding="utf-8"))):
        found = disagreement(try_model(model_type), tmp_path)
        if found is not None and not found.startswith("refused"):
            differing[model_type] = found
    assert not differing
