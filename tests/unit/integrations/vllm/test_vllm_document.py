"""docs/vllm.md names keys and metrics that there are, and all of them; ``make e2e-vllm`` runs its commands."""

import re

from tests.sources import ROOT
from tests.support.vllm_document import PATH, VllmDocument
from unified_cache.integrations.vllm.metrics import FIGURES
from unified_cache.integrations.vllm.settings import TierSettings, own_keys

DOCUMENT = VllmDocument.read()

KNOWN_COMMANDS = {
    ("pip", "install", "unified-cache"),
    ("vllm", "serve", "MODEL"),
    ("unified-cache", "storage", "stat"),
    ("unified-cache", "storage", "verify"),
}
"""Beginnings of commands that a check of ``make e2e-vllm`` runs."""


def test_the_launch_line_says_what_the_tier_takes() -> None:
    extra = DOCUMENT.launch.extra
    settings = TierSettings.of({key: value for key, value in extra.items() if key in own_keys()})
    assert settings.url == "file:/var/cache/kv"
    assert set(extra) == {"url", "cpu_bytes_to_use"}
    assert DOCUMENT.launch.transfer["kv_connector_module_path"] == "unified_cache.integrations.vllm.connector"


def test_the_tier_among_others_says_what_the_tier_takes() -> None:
    tier = {key: value for key, value in DOCUMENT.tier.items() if key not in {"type", "module_path"}}
    assert TierSettings.of(tier).revision
    assert DOCUMENT.tier["module_path"] == "unified_cache.integrations.vllm.tier"


def test_every_key_of_the_tier_is_explained_and_no_other() -> None:
    assert DOCUMENT.keys == own_keys()


def test_every_metric_of_the_tier_is_explained_and_no_other() -> None:
    ours = {name for name in DOCUMENT.metrics if name.startswith("vllm:unified_cache")}
    assert ours == {figure.name for figure in FIGURES}


def test_no_command_of_the_document_is_left_out_of_the_checks() -> None:
    assert {command[:3] for command in DOCUMENT.commands} == KNOWN_COMMANDS


def test_every_target_of_make_that_the_document_names_is_there() -> None:
    named = set(re.findall(r"`make ([a-z0-9-]+)", PATH.read_text(encoding="utf-8")))
    assert named == {"bench-vllm", "e2e-vllm", "test"}
    assert named <= set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
