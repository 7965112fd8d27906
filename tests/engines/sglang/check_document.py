"""Every command of docs/sglang.md, executed: the document says what runs, and cannot say more.

pip install            the library, from this repository; commands after it are those that it installs
sglang.launch_server   the engine's own parser reads it, and an engine with these settings stores and restores
curl                   the engine's own route and request; an engine attaches the store that it names
unified-cache          over what these engines have stored
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tests.engines.sglang.bench import ROOT, Bench
from tests.engines.sglang.outcome import EngineJob
from tests.support.documents import shell_commands

DOCUMENT = ROOT / "docs" / "sglang.md"
PLACE = "/var/cache/kv"
"""Directory of the document's stores."""

PAGE_TOKENS = 64
"""Of the runs that stand for the document's servers."""

INLINE = re.compile(r"`(unified-cache storage [^`]+)`")
COMMAND_S = 300.0


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command: those of shell blocks, and those of ours in the text."""
    yield from shell_commands(text)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in INLINE.findall(outside):
        yield shlex.split(found)


def check_every_command_in_its_order(bench: Bench) -> None:
    reader = DocumentReader(bench)
    for words in commands(DOCUMENT.read_text(encoding="utf-8")):
        match words:
            case ["pip", "install", "unified-cache"]:
                reader.install()
            case ["python", "-m", "sglang.launch_server", *arguments]:
                reader.launch(arguments)
            case ["curl", *arguments]:
                reader.request(arguments)
            case ["unified-cache", *_]:
                reader.run(words)
            case _:
                raise AssertionError(f"expected a command that is executed here, found {shlex.join(words)}")


class DocumentReader:
    """The document's commands, in order, over stores in the directory of a bench."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._installed = bench.root / "document-installed"
        self._replaced: dict[str, Any] | None = None

    def install(self) -> None:
        """Install the library as it is here."""
        options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(self._installed)]
        self._end([sys.executable, "-m", "pip", "install", *options, str(ROOT)])

    def launch(self, arguments: list[str]) -> None:
        """Run an engine with the arguments of a server."""
        told = self._bench.understood("launch", *arguments)
        assert told["page_size"] == PAGE_TOKENS
        if told["enable_unified_cache_external_linker"]:
            linked = told["unified_cache_external_linker_config"]["linker_extra_config"]
            stores = [{**store, "host_bytes": "256MB"} for store in self._stores(linked)]
            self._bench.run(EngineJob(stores=stores, linked="whole"))
            return
        if told["hicache_storage_backend"] == "file":
            extra = json.loads(told["hicache_storage_backend_extra_config"])
            self._replaced = {**extra, "file_storage_path": str(self._bench.root / "document-theirs")}
            self._bench.run(EngineJob(stores=[self._replaced], layout=told["hicache_mem_layout"]))
            return
        settings = (told["enable_hierarchical_cache"], told["hicache_storage_backend"], told["hicache_write_policy"])
        assert settings == (True, "dynamic", "write_through")
        stores = self._stores(json.loads(told["hicache_storage_backend_extra_config"]))
        self._bench.run(EngineJob(stores=stores, layout=told["hicache_mem_layout"]))

    def request(self, arguments: list[str]) -> None:
        """Attach what a request to the server names, in place of a file backend that was launched before.

        What detaches is tried in every run.
        """
        options = dict(pairwise(arguments))
        path = next(word for word in arguments if word.startswith("localhost:")).partition("/")[2]
        told = self._bench.understood("request", options["-X"], f"/{path}", options.get("-d", ""))
        has_key = any(word.startswith("Authorization: Bearer ") for word in arguments)
        assert has_key or not told["needs_key"], "its route asks for the administrator's key"
        if "hicache_storage_backend" in told:
            stores = self._stores(json.loads(told["hicache_storage_backend_extra_config_json"]))
            self._bench.run(EngineJob(stores=stores, attach=True, replaces=self._replaced))

    def run(self, words: list[str]) -> None:
        """Run a command of ours over a store that an engine has written."""
        place = self._bench.root / "document-file"
        if any(word.startswith("file:") for word in words) and not place.exists():
            self._bench.prepare(EngineJob(stores=[self._bench.store(f"file:{place}")], phases="write"))
        self._end([str(self._installed / "bin" / words[0]), *map(self._placed, words[1:])])

    def _stores(self, extra: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"revision": "the document's", **extra, "url": self._placed(extra["url"])}]

    def _placed(self, word: str) -> str:
        kind, _, place = word.partition(":")
        return f"{kind}:{self._bench.root / f'document-{kind}'}" if place == PLACE else word

    def _end(self, command: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(self._installed)}
        ended = subprocess.run(
            command,
            cwd=self._bench.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
