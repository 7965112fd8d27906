"""Settings are described once: the document and the library say the same."""

from pathlib import Path

import pytest

from scripts.configuration_table import DOCUMENT, with_table
from tests.support.cluster import ask
from tests.support.documents import code_blocks, command_lines
from unified_cache import Full, ModelLayout, PoolSpec, SlidingWindow
from unified_cache.core.config import CacheConfig, EvictionPolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Tier
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.describe import settings_of
from unified_cache.core.settings.loading import SECTIONS
from unified_cache.core.sizes import SizedTiers

FULL_ALONE = ModelLayout(16, (Full((PoolSpec("kv", 4096),)),))
TWO_COMPONENTS = ModelLayout(16, (Full((PoolSpec("kv", 4096),)), SlidingWindow(64, 16, (PoolSpec("swa", 1024),))))
GUIDE = DOCUMENT.read_text(encoding="utf-8")


def test_the_table_of_the_document_is_that_of_the_code() -> None:
    assert with_table(GUIDE) == GUIDE, "python -m scripts.configuration_table writes it"


def test_every_setting_has_a_meaning() -> None:
    assert [each.name for model in SECTIONS.values() for each in settings_of(model) if not each.meaning] == []


def test_a_cache_without_settings_is_that_of_the_library() -> None:
    config = EmbeddedSettings(device_pages=(100,)).config(FULL_ALONE)
    assert config == CacheConfig(device_pages=(100,), host_pages=(0,))


def test_bytes_become_pages_that_fill_at_the_same_prompt() -> None:
    settings = EmbeddedSettings(device_bytes=1 << 30, host_bytes=2 << 30)
    config = settings.config(TWO_COMPONENTS)
    sizes = SizedTiers.of(TWO_COMPONENTS, config.retention)
    for pages, tier_bytes, sealed in ((config.device_pages, 1 << 30, False), (config.host_pages, 2 << 30, True)):
        taken = TWO_COMPONENTS.prompt_bytes(pages, sealed=sealed)
        assert 0.99 * tier_bytes < taken <= tier_bytes
        ratio = pages[0] / pages[1]
        assert ratio == pytest.approx(sizes.typical_pages[0] / sizes.typical_pages[1], rel=0.01)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (EmbeddedSettings(), "device_bytes or device_pages must be set"),
        (EmbeddedSettings(device_bytes=1 << 30, device_pages=(3,)), "must not both be set"),
        (EmbeddedSettings(device_bytes=100), "device_bytes must be at least"),
        (EmbeddedSettings(device_pages=(3, 4)), "need an entry for each component"),
    ],
)
def test_sizes_that_an_engine_cannot_use_are_refused(settings: EmbeddedSettings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings.config(FULL_ALONE)


def test_one_policy_is_that_of_every_component() -> None:
    settings = EmbeddedSettings.model_validate({"device_pages": 9, "eviction": {"device": "priority"}})
    eviction = settings.config(TWO_COMPONENTS).eviction
    assert [eviction.policy(Tier.DEVICE, each) for each in range(2)] == [EvictionPolicy.PRIORITY] * 2
    assert eviction.policy(Tier.HOST, 1) is EvictionPolicy.LRU


def test_the_blocks_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, commands, program = code_blocks(GUIDE)
    Path("unified-cache.toml").write_text(file.text.replace("/var/cache", str(tmp_path)), encoding="utf-8")
    assert ask("config", "check").status == 0
    names: dict[str, object] = {}
    exec(compile(program.text, "docs/configuration.md", "exec"), names)
    config = names["config"]
    assert isinstance(config, CacheConfig)
    assert config.guard is not None
    assert config.guard.deadline_s == 2.0
    for words in command_lines(commands):
        said = ask(*words[1:])
        assert said.status == 0, said.err
