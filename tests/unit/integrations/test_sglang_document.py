"""The commands of docs/sglang.md are such as ``make e2e-sglang`` executes, and their configurations are accepted."""

import json
from types import SimpleNamespace

import pytest

from tests.engines.sglang.check_document import DOCUMENT, commands
from unified_cache.components.layouts import layout
from unified_cache.integrations.sglang.settings import HiCacheSettings, LinkerSettings, StoreSettings

SHOWN = list(commands(DOCUMENT.read_text(encoding="utf-8")))
EXTRA = "--hicache-storage-backend-extra-config"
LINKED = "linker_extra_config"
JSON_EXTRA = "hicache_storage_backend_extra_config_json"


def configurations() -> list[dict[str, object]]:
    bodies = [json.loads(word) for words in SHOWN for word in words if word.lstrip().startswith("{")]
    extras = [json.loads(body[JSON_EXTRA]) if JSON_EXTRA in body else body for body in bodies]
    return [extra for extra in extras if "file_storage_path" not in extra]


@pytest.mark.parametrize("extra", configurations(), ids=str)
def test_a_configuration_of_the_document_is_accepted(extra: dict[str, object]) -> None:
    settings: StoreSettings
    if LINKED in extra:
        linked = extra[LINKED]
        assert isinstance(linked, dict)
        settings, extra = LinkerSettings.of(linked), linked
    else:
        settings = HiCacheSettings.of(SimpleNamespace(extra_config=extra, dcp_size=1, should_split_heads=False))
    assert settings.url == extra["url"]


def test_the_log_line_of_the_document_says_the_bytes_of_its_model_and_pages() -> None:
    launch = next(words for words in SHOWN if EXTRA in words)
    page_tokens = int(launch[launch.index("--page-size") + 1])
    (kv,) = layout("qwen3-8b", page_size=page_tokens).pools
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"unified-cache stores pages of {page_tokens} tokens, kv ({kv.page_bytes} bytes) in packed:" in text
    assert "Qwen/Qwen3-8B" in launch


def test_the_document_shows_commands_of_every_kind() -> None:
    assert {words[0] for words in SHOWN} == {"pip", "python", "curl", "unified-cache"}
    assert len(configurations()) == 3
    assert sum(EXTRA in words for words in SHOWN) == 2
