"""docs/vllm.md names keys and metrics that there are, and all of them; ``make e2e-vllm`` runs its commands."""

import re

from tests.sources import ROOT
from tests.support.vllm_document import COMMANDS, EXTRA, KEYS, METRICS, TEXT, TIER, TRANSFER
from unified_cache.integrations.vllm.metrics import FIGURES
from unified_cache.integrations.vllm.settings import TierSettings

KNOWN_COMMANDS = {
    ("pip", "install", "unified-cache"),
    ("vllm", "serve", "MODEL"),
    ("unified-cache", "storage", "stat"),
    ("unified-cache", "storage", "verify"),
}
"""Beginnings of commands: ``make release`` installs, a check of ``make e2e-vllm`` runs the others."""


def test_the_launch_line_says_what_the_tier_takes() -> None:
    settings = TierSettings.of({key: value for key, value in EXTRA.items() if key in TierSettings.model_fields})
    assert settings.url == "file:/var/cache/kv"
    assert set(EXTRA) == {"url", "cpu_bytes_to_use"}
    assert TRANSFER["kv_connector_module_path"] == "unified_cache.integrations.vllm.connector"


def test_the_tier_among_others_says_what_the_tier_takes() -> None:
    tier = {key: value for key, value in TIER.items() if key not in {"type", "module_path"}}
    assert TierSettings.of(tier).revision
    assert TIER["module_path"] == "unified_cache.integrations.vllm.tier"


def test_every_key_of_the_tier_is_explained_and_no_other() -> None:
    assert TierSettings.model_fields.keys() == KEYS


def test_every_metric_of_the_tier_is_explained_and_no_other() -> None:
    ours = {name for name in METRICS if name.startswith("vllm:unified_cache")}
    assert ours == {figure.name for figure in FIGURES}


def test_no_command_of_the_document_is_left_out_of_the_checks() -> None:
    assert {command[:3] for command in COMMANDS} == KNOWN_COMMANDS


def test_every_target_of_make_that_the_document_names_is_there() -> None:
    named = set(re.findall(r"`make ([a-z0-9-]+)", TEXT))
    assert named
    assert named <= set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
