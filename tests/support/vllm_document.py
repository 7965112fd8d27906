"""Commands, keys and metrics that docs/vllm.md tells a user of, read from the document itself."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tests.sources import ROOT
from tests.support.documents import code_blocks, shell_commands

TEXT = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")

COMMANDS = [tuple(words) for words in shell_commands(TEXT)]
"""Every command of a shell block, in order, as arguments."""

(LAUNCH,) = (command for command in COMMANDS if command[:2] == ("vllm", "serve"))
assert LAUNCH[-2] == "--kv-transfer-config"
"""The command that starts vLLM over a store."""

TRANSFER: Mapping[str, object] = json.loads(LAUNCH[-1])
"""Configuration of vLLM's connector."""

EXTRA: Mapping[str, object] = json.loads(LAUNCH[-1])["kv_connector_extra_config"]
"""Keys of the connector: vLLM's and ours."""

(TIER,) = (json.loads(block.text) for block in code_blocks(TEXT) if block.language == "json")
"""The tier as one among others."""

_NAMED = [
    name for row in re.findall(r"^\| (`.*?) \| .* \|$", TEXT, re.MULTILINE) for name in re.findall("`([^`]+)`", row)
]
"""What the first columns of tables name."""

KEYS = frozenset(name for name in _NAMED if re.fullmatch(r"[a-z_]+", name))
"""Keys that the first table explains."""

METRICS = frozenset(
    re.sub(r"^\.\.\.", "vllm:unified_cache", name.partition("{")[0].removesuffix("_total"))
    for name in _NAMED
    if name.startswith(("vllm:", "..."))
)
"""Names of metrics, without what Prometheus's clients put behind a counter's."""


def launch_of(model: Path, **keys: object) -> list[str]:
    """Return the command that starts vLLM for a model, with other values of some of the connector's keys."""
    transfer = {**TRANSFER, "kv_connector_extra_config": {**EXTRA, **keys}}
    return [str(model) if each == "MODEL" else each for each in LAUNCH[:-1]] + [json.dumps(transfer)]
