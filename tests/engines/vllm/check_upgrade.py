"""The oldest and the newest version that we promise over one store: what one has stored the other restores."""

from pathlib import Path

import pytest

from tests.engines.versions import VERSIONS
from tests.engines.vllm.check_real_model import ANN, BEN, blocks
from tests.engines.vllm.faults import LogPath
from tests.engines.vllm.installation import HOME_VARIABLE, VERSION_VARIABLE
from tests.engines.vllm.real_model import BLOCK_TOKENS, serving
from tests.engines.vllm.server import SaidWords

STORED = (len(ANN) + len(BEN)) // BLOCK_TOKENS - 1
"""Chunks of both prompts, at the least."""


def check_an_upgrade_keeps_words_and_hits(log_path: LogPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME_VARIABLE, raising=False)  # a home has one version
    said: list[list[SaidWords]] = []
    for version in (VERSIONS["vllm"][0], VERSIONS["vllm"][-1]):
        monkeypatch.setenv(VERSION_VARIABLE, version)
        with serving(log_path(version), f"file:{tmp_path}") as server:
            said.append([server.say(prompt) for prompt in (ANN, BEN)])
            server.settle(STORED if len(said) == 1 else 0)
            server.stop()
    before, after = said
    assert [each.text for each in after] == [each.text for each in before]
    assert [each.cached for each in before] == [0, 0]
    assert [each.cached for each in after] == [blocks(ANN), blocks(BEN)]
