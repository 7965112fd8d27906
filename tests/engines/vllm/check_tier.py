"""The tier as one among others in vLLM's ``secondary_tiers``, without our connector, as docs/vllm.md writes it."""

from pathlib import Path

import pytest

from tests.engines.vllm.engine import running_engine
from tests.engines.vllm.faults import (
    CACHED,
    CHUNKS,
    DEADLINE_S,
    OTHER,
    PROMPT,
    LogPath,
    ModelPath,
    Right,
    answered_rightly,
)
from tests.support.vllm_document import TIER


def tier_over(directory: Path, **keys: object) -> dict[str, object]:
    """Return the document's tier over a store here, with other values of some keys."""
    return {**TIER, "url": f"file:{directory}", "on_reset": "keep", "deadline_s": DEADLINE_S, **keys}


def check_a_tier_without_the_connector_finds_pages_of_its_revision_alone(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    model, tier = model_path("llama"), tier_over(tmp_path / "store")
    with running_engine(model, "llama", None, log_path("first"), tiers=[tier]) as engine:
        assert answered_rightly(engine, right).cached == 0
        engine.settle()
        engine.reset()
        assert answered_rightly(engine, right).cached == CACHED
        assert engine.loaded() == CHUNKS
        left = engine.close()
        assert left.threads == left.regions == ()
        assert not left.slab_bytes
    other = tier_over(tmp_path / "store", revision="other weights")
    with running_engine(model, "llama", None, log_path("other"), tiers=[other]) as engine:
        assert answered_rightly(engine, right).cached == 0
        assert engine.loaded() == 0


def check_a_tier_beside_fs_serves_what_fs_does_not_have(
    right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    ours = tier_over(tmp_path / "store")
    both: list[dict[str, object]] = [{"type": "fs", "root_dir": str(tmp_path / "fs")}, ours]
    with running_engine(model_path("llama"), "llama", None, log_path("both"), tiers=both) as engine:
        for prompt in (PROMPT, OTHER):
            assert answered_rightly(engine, right, prompt).cached == 0
        engine.settle()
        assert engine.counted("store_chunks", answer="stored") == 2 * CHUNKS
    fresh: list[dict[str, object]] = [{"type": "fs", "root_dir": str(tmp_path / "another fs")}, ours]
    with running_engine(model_path("llama"), "llama", None, log_path("fresh"), tiers=fresh) as engine:
        for prompt in (PROMPT, OTHER):
            assert answered_rightly(engine, right, prompt).cached == CACHED
        assert engine.loaded() == 2 * CHUNKS


def check_a_tier_without_a_revision_is_refused_at_the_start(
    model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    tier = {key: value for key, value in tier_over(tmp_path / "store").items() if key != "revision"}
    with (
        pytest.raises(AssertionError, match="the engine ended at open") as refused,
        running_engine(model_path("llama"), "llama", None, log_path("engine"), tiers=[tier]),
    ):
        pass
    assert "needs the revision of" in str(refused.value)
    assert "say revision, or use UnifiedCacheConnector" in str(refused.value)
    assert not (tmp_path / "store").exists()
