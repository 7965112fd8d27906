"""Commands, keys and metrics that docs/vllm.md tells a user of, read from the document itself."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.sources import ROOT
from tests.support.documents import code_blocks, shell_commands

__all__ = ["PATH", "LaunchLine", "VllmDocument"]

PATH = ROOT / "docs" / "vllm.md"

ROW = re.compile(r"^\| (`.*?) \| (.*) \|$", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")

TRANSFER_FLAG = "--kv-transfer-config"


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """The command that starts vLLM over a store."""

    arguments: tuple[str, ...]
    """With the text of the configuration as the last."""

    @property
    def transfer(self) -> dict[str, object]:
        """Configuration of vLLM's connector."""
        found: object = json.loads(self.arguments[-1])
        assert isinstance(found, dict)
        return found

    @property
    def extra(self) -> dict[str, object]:
        """Keys of the connector: vLLM's and ours."""
        found = self.transfer["kv_connector_extra_config"]
        assert isinstance(found, dict)
        return found

    def of(self, model: Path, **keys: object) -> list[str]:
        """Return the command for a model, with other values of some of the connector's keys."""
        transfer = {**self.transfer, "kv_connector_extra_config": {**self.extra, **keys}}
        return [str(model) if each == "MODEL" else each for each in self.arguments[:-1]] + [json.dumps(transfer)]


@dataclass(frozen=True, slots=True)
class VllmDocument:
    """The document: its commands, its JSON, and what its tables name."""

    commands: tuple[tuple[str, ...], ...]
    """Every command of a shell block, in order, as arguments."""
    tier: dict[str, object]
    """The tier as one among others."""
    keys: frozenset[str]
    """Keys that the first table explains."""
    metrics: frozenset[str]
    """Names of metrics, without what Prometheus's clients put behind a counter's."""

    @classmethod
    def read(cls) -> "VllmDocument":
        """Read it."""
        text = PATH.read_text(encoding="utf-8")
        (tier,) = (json.loads(block.text) for block in code_blocks(text) if block.language == "json")
        first = [QUOTED.findall(row[1]) for row in ROW.finditer(text)]
        named = [name for names in first for name in names]
        return cls(
            commands=tuple(map(tuple, shell_commands(text))),
            tier=tier,
            keys=frozenset(name for name in named if re.fullmatch(r"[a-z_]+", name)),
            metrics=frozenset(_metric(name) for name in named if name.startswith(("vllm:", "..."))),
        )

    @property
    def launch(self) -> LaunchLine:
        """The command that starts vLLM."""
        (found,) = (command for command in self.commands if command[:2] == ("vllm", "serve"))
        assert found[-2] == TRANSFER_FLAG
        return LaunchLine(found)

    @property
    def install(self) -> tuple[str, ...]:
        """The command that installs this package."""
        (found,) = (command for command in self.commands if command[0] == "pip")
        return found

    @property
    def store_commands(self) -> tuple[tuple[str, ...], ...]:
        """Commands over the store."""
        return tuple(command for command in self.commands if command[0] == "unified-cache")


def _metric(name: str) -> str:
    """Return the name of a metric as the tier defines it."""
    bare = name.partition("{")[0].removesuffix("_total")
    return "vllm:unified_cache" + bare.removeprefix("...") if bare.startswith("...") else bare
