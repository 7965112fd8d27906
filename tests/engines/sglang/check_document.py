"""Every command of docs/sglang.md, executed: the document says what runs, and cannot say more.

sglang.launch_server   the engine's own parser reads it, and an engine with these settings stores and restores
curl                   the engine's own route and request; an engine attaches the store that it names
unified-cache          over what these engines have stored
"""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.runner import ROOT, EngineRunner
from tests.support.cluster import ask
from tests.support.documents import shell_commands

DOCUMENT = ROOT / "docs" / "sglang.md"
PLACE = "/var/cache/kv"
"""Directory of the document's stores."""

PAGE_TOKENS = 64
"""Of the runs that stand for the document's servers."""

LINKED = "--enable-unified-cache-external-linker"
"""Of a server's arguments; SGLang loads no linker but its own before 0.5.23, as the document says."""

INLINE = re.compile(r"`(unified-cache storage [^`]+)`")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command: those of shell blocks, and those of ours in the text."""
    yield from shell_commands(text)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in INLINE.findall(outside):
        yield shlex.split(found)


def check_every_command_in_its_order(runner: EngineRunner) -> None:
    for words in commands(DOCUMENT.read_text(encoding="utf-8")):
        match words:
            case ["pip", "install", "unified-cache"]:
                pass  # make release installs
            case ["python", "-m", "sglang.launch_server", *arguments]:
                launch(runner, arguments)
            case ["curl", *arguments]:
                request(runner, arguments)
            case ["unified-cache", *arguments]:
                said = ask(*(placed(runner, word) for word in arguments))
                assert said.status == 0, said.err
            case _:
                raise AssertionError(f"expected a command that is executed here, found {shlex.join(words)}")


def launch(runner: EngineRunner, arguments: list[str]) -> None:
    """Run an engine with the arguments of a server; SGLang's own file backend is its own affair."""
    if LINKED in arguments and runner.linker_refusal:
        with pytest.raises(RuntimeError, match="invalid choice: 'dynamic'"):
            runner.understood("launch", *arguments)
        return
    told = runner.understood("launch", *arguments)
    assert told["page_size"] == PAGE_TOKENS
    if told["enable_unified_cache_external_linker"]:
        linked = told["unified_cache_external_linker_config"]["linker_extra_config"]
        runner.run(EngineJob(stores=[{**stored(runner, linked), "host_bytes": "256MB"}], linked="whole"))
    elif told["hicache_storage_backend"] != "file":
        settings = (told["enable_hierarchical_cache"], told["hicache_storage_backend"], told["hicache_write_policy"])
        assert settings == (True, "dynamic", "write_through")
        store = stored(runner, json.loads(told["hicache_storage_backend_extra_config"]))
        runner.run(EngineJob(stores=[store], layout=told["hicache_mem_layout"]))


def request(runner: EngineRunner, arguments: list[str]) -> None:
    """Attach what a request to the server names; what detaches is tried in every run."""
    options = dict(pairwise(arguments))
    path = next(word for word in arguments if word.startswith("localhost:")).partition("/")[2]
    told = runner.understood("request", options["-X"], f"/{path}", options.get("-d", ""))
    has_key = any(word.startswith("Authorization: Bearer ") for word in arguments)
    assert has_key or not told["needs_key"], "its route asks for the administrator's key"
    if "hicache_storage_backend" in told:
        store = stored(runner, json.loads(told["hicache_storage_backend_extra_config_json"]))
        runner.run(EngineJob(stores=[store], attach=True))


def stored(runner: EngineRunner, extra: dict[str, Any]) -> dict[str, Any]:
    return {"revision": "the document's", **extra, "url": placed(runner, extra["url"])}


def placed(runner: EngineRunner, word: str) -> str:
    kind, _, place = word.partition(":")
    return f"{kind}:{runner.root / f'document-{kind}'}" if place == PLACE else word
