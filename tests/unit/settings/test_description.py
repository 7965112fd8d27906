"""Settings are described once: help, the document, the file to begin with and the library say the same."""

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from scripts.configuration_table import DOCUMENT, with_table
from tests.e2e.test_help import deferred_commands
from tests.support.cluster import ask
from tests.support.documents import code_blocks, command_lines
from unified_cache import Full, ModelLayout, PoolSpec, SlidingWindow
from unified_cache.cli.config import file_to_begin_with
from unified_cache.core.config import CacheConfig, EvictionPolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Tier
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.describe import settings_of
from unified_cache.core.settings.loading import read_settings
from unified_cache.core.settings.names import SECTIONS, flag_name
from unified_cache.core.settings.programs import PlanChoices, ReplayChoices
from unified_cache.core.settings.section import Settings
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.core.tier_sizes import SizedTiers, prompt_bytes

TWO_COMPONENTS = ModelLayout(16, (Full((PoolSpec("kv", 4096),)), SlidingWindow(64, 16, (PoolSpec("swa", 1024),))))
GUIDE = DOCUMENT.read_text(encoding="utf-8")


def test_the_table_of_the_document_is_that_of_the_code() -> None:
    assert with_table(GUIDE) == GUIDE, "python -m scripts.configuration_table writes it"


def test_every_setting_has_a_meaning() -> None:
    assert [each.name for model in SECTIONS.values() for each in settings_of(model) if not each.meaning] == []


def test_a_cache_has_every_setting_of_the_library_with_its_default() -> None:
    described = {each.name.split(".")[0] for each in settings_of(EmbeddedSettings)}
    of_engines = {"prefill"}  # a curve that an engine has measured or computed, given in code
    assert {field.name for field in fields(CacheConfig)} - of_engines <= described
    layout = ModelLayout(16, (Full((PoolSpec("kv", 4096),)),))
    config = EmbeddedSettings(device_pages=(100,)).config(layout)
    assert config == CacheConfig(device_pages=(100,), host_pages=(0,))


def test_every_name_is_of_one_kind_wherever_it_is() -> None:
    kinds: dict[str, set[str]] = {}
    for model in SECTIONS.values():
        for each in settings_of(model):
            kinds.setdefault(each.name, set()).add(each.kind)
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("name", "model"), [("serve", ServiceSettings), ("replay", ReplayChoices), ("plan", PlanChoices)]
)
def test_the_flags_of_a_command_are_called_as_its_settings(name: str, model: type[Settings]) -> None:
    (command,) = (each.load() for each in deferred_commands() if each.name == name)
    flags = {flag_name(each.path) for each in settings_of(model)}
    own = {
        "--help",
        "--config",
        "--set",
        "--json",
        "--json-file",
        "--print-config",
        "--policy",
    }
    found = {option.opts[0] for option in command.params if option.opts[0].startswith("--")}
    assert found - flags - own == set()
    assert len(found & flags) >= 4


@pytest.mark.parametrize("section", SECTIONS)
def test_a_file_to_begin_with_has_every_setting_and_its_default(section: str, tmp_path: Path) -> None:
    text = file_to_begin_with([section])
    assert tomllib.loads(text) == {section: {}}, "all else stands as a comment"
    lines = [line for line in text.splitlines() if not line.endswith("# unset")]
    uncommented = [line.removeprefix("# ") if line.startswith("# [") or " = " in line else "" for line in lines]
    shown = "\n".join(line for line in uncommented if not line.startswith(("Sizes", "# ")))
    if section == "serve":
        shown = shown.replace("[serve.quota.tenants.NAME]", "[serve.quota.tenants.acme]").replace("[serve.tls]", "")
    path = tmp_path / "a.toml"
    path.write_text(shown, encoding="utf-8")
    found = read_settings(SECTIONS[section], path, environment={}).settings.model_dump()
    usual = SECTIONS[section]().model_dump()
    if section == "serve":
        found["quota"]["tenants"] = {}
    assert found == usual


def test_bytes_become_pages_that_fill_at_the_same_prompt() -> None:
    layout = ModelLayout(16, (Full((PoolSpec("kv", 4096),)), SlidingWindow(64, 16, (PoolSpec("swa", 1024),))))
    settings = EmbeddedSettings(device_bytes=1 << 30, host_bytes=2 << 30)
    config = settings.config(layout)
    sizes = SizedTiers.of(layout, settings.retention)
    for pages, tier_bytes, sealed in ((config.device_pages, 1 << 30, False), (config.host_pages, 2 << 30, True)):
        taken = prompt_bytes(layout, pages, sealed=sealed)
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
        settings.config(ModelLayout(16, (Full((PoolSpec("kv", 4096),)),)))


def test_one_policy_is_that_of_every_component() -> None:
    settings = EmbeddedSettings.model_validate({"device_pages": 9, "eviction": {"device": "priority"}})
    layout = ModelLayout(16, (Full((PoolSpec("kv", 4096),)), SlidingWindow(64, 16, (PoolSpec("swa", 1024),))))
    eviction = settings.config(layout).eviction
    assert [eviction.policy(Tier.DEVICE, each) for each in range(2)] == [EvictionPolicy.PRIORITY] * 2
    assert eviction.policy(Tier.HOST, 1) is EvictionPolicy.LRU


def test_the_blocks_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, commands, program = code_blocks(GUIDE)
    Path("unified-cache.toml").write_text(file.text.replace("/var/cache", str(tmp_path)), encoding="utf-8")
    assert ask("config", "check").status == 0
    with_sizes = f'device_bytes = "1GiB"\n{Path("unified-cache.toml").read_text(encoding="utf-8")}'
    Path("unified-cache.toml").write_text(with_sizes, encoding="utf-8")
    names: dict[str, object] = {}
    exec(compile(program.text, "docs/configuration.md", "exec"), names)
    config = names["config"]
    assert isinstance(config, CacheConfig)
    assert config.guard is not None
    assert config.guard.deadline_s == 2.0
    for words in command_lines(commands):
        arguments, target = (words[:-2], words[-1]) if ">" in words else (words, None)
        said = ask(*arguments[1:])
        assert said.status == 0, said.err
        if target is not None:
            Path(target).write_text(said.out, encoding="utf-8")
