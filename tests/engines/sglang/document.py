"""Every command of docs/sglang.md, executed: the document says what runs, and cannot say more.

pip install            the library, from this repository; commands after it are those that it installs
sglang.launch_server   the engine's own parser reads it, and an engine with these settings stores and restores
curl                   the engine's own route and request; an engine attaches the store that it names
unified-cache          over what these engines have stored
make e2e-sglang        this program's own parser reads its arguments
"""

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tests.engines.sglang.bench import ROOT, Bench, whole
from tests.engines.sglang.outcome import EngineJob
from tests.support.documents import shell_commands

__all__ = ["DOCUMENT", "UnknownCommandError", "commands", "execute"]

DOCUMENT = ROOT / "docs" / "sglang.md"
PLACE = "/var/cache/kv"
"""Directory of the document's stores."""

PAGE_TOKENS = 64
"""Of the runs that stand for the document's servers."""

INLINE = re.compile(r"`((?:unified-cache storage|make) [^`]+)`")
COMMAND_S = 300.0


class UnknownCommandError(Exception):
    """A command of the document that this module cannot execute."""


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command: those of shell blocks, and those of ours in the text."""
    yield from shell_commands(text)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in INLINE.findall(outside):
        yield shlex.split(found)


def execute(bench: Bench, parser: ArgumentParser) -> None:
    """Execute every command; the arguments of ``make e2e-sglang`` are read by ``parser``, this program's own."""
    reader = _Reader(bench)
    for words in commands(DOCUMENT.read_text(encoding="utf-8")):
        shown = " ".join(words)
        name = f"command {shown[:60]}"
        match words:
            case ["pip", "install", "unified-cache"]:
                bench.line(*reader.install(name))
            case ["python", "-m", "sglang.launch_server", *arguments]:
                reader.launch(name, arguments)
            case ["curl", *arguments]:
                reader.request(name, arguments)
            case ["unified-cache", *_]:
                bench.line(*reader.run(name, words))
            case ["make", "e2e-sglang", *rest]:
                bench.line(*_parsed(name, parser, rest))
            case _:
                raise UnknownCommandError(f"expected a command that is executed here in {DOCUMENT}, found {shown}")


def _parsed(name: str, parser: ArgumentParser, words: Sequence[str]) -> tuple[bool, str, str]:
    """Read the variables of a call of make."""
    arguments = [argument for word in words for argument in shlex.split(word.removeprefix("ARGS="))]
    try:
        chosen = parser.parse_args(arguments)
    except SystemExit:
        return False, name, f"this program does not understand {shlex.join(arguments)}"
    return True, name, f"{', '.join(chosen.sections) or 'all'} of its sections"


class _Reader:
    """The document's commands, in order, over stores in the directory of a bench."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._installed = bench.root / "document-installed"
        self._replaced: dict[str, Any] | None = None

    def install(self, name: str) -> tuple[bool, str, str]:
        """Install the library as it is here."""
        options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(self._installed)]
        return self._ended(name, [sys.executable, "-m", "pip", "install", *options, str(ROOT)])

    def launch(self, name: str, arguments: list[str]) -> None:
        """Run an engine with the arguments of a server."""
        told = self._bench.understood(name, "launch", *arguments)
        if told is None:
            return
        if told["page_size"] != PAGE_TOKENS:
            self._bench.line(False, name, f"expected pages of {PAGE_TOKENS} tokens, found {told['page_size']}")
            return
        if told["enable_unified_cache_external_linker"]:
            linked = told["unified_cache_external_linker_config"]["linker_extra_config"]
            stores = [{**store, "host_bytes": "256MB"} for store in self._stores(linked)]
            self._bench.run(name, whole, EngineJob(stores=stores, linked="whole"))
            return
        if told["hicache_storage_backend"] == "file":
            extra = json.loads(told["hicache_storage_backend_extra_config"])
            self._replaced = {**extra, "file_storage_path": str(self._bench.root / "document-theirs")}
            self._bench.run(name, whole, EngineJob(stores=[self._replaced], layout=told["hicache_mem_layout"]))
            return
        settings = (told["enable_hierarchical_cache"], told["hicache_storage_backend"], told["hicache_write_policy"])
        if settings != (True, "dynamic", "write_through"):
            self._bench.line(False, name, f"expected a dynamic backend of the hierarchical cache, found {settings}")
            return
        stores = self._stores(json.loads(told["hicache_storage_backend_extra_config"]))
        self._bench.run(name, whole, EngineJob(stores=stores, layout=told["hicache_mem_layout"]))

    def request(self, name: str, arguments: list[str]) -> None:
        """Attach what a request to the server names, in place of a file backend that was launched before.

        What detaches is tried in every run.
        """
        options = dict(pairwise(arguments))
        path = next(word for word in arguments if word.startswith("localhost:")).partition("/")[2]
        told = self._bench.understood(name, "request", options["-X"], f"/{path}", options.get("-d", ""))
        if told is None:
            return
        has_key = any(word.startswith("Authorization: Bearer ") for word in arguments)
        if told["needs_key"] and not has_key:
            self._bench.line(False, name, "its route asks for the administrator's key")
        elif "hicache_storage_backend" in told:
            stores = self._stores(json.loads(told["hicache_storage_backend_extra_config_json"]))
            self._bench.run(name, whole, EngineJob(stores=stores, attach=True, replaces=self._replaced))
        else:
            self._bench.line(True, name, "its route is there")

    def run(self, name: str, words: list[str]) -> tuple[bool, str, str]:
        """Run a command of ours over a store that an engine has written."""
        place = self._bench.root / "document-file"
        if any(word.startswith("file:") for word in words) and not place.exists():
            self._bench.prepare(name, EngineJob(stores=[self._bench.store(f"file:{place}")], phases="write"))
        command = [str(self._installed / "bin" / words[0]), *map(self._placed, words[1:])]
        return self._ended(name, command)

    def _stores(self, extra: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"revision": "the document's", **extra, "url": self._placed(extra["url"])}]

    def _placed(self, word: str) -> str:
        kind, _, place = word.partition(":")
        return f"{kind}:{self._bench.root / f'document-{kind}'}" if place == PLACE else word

    def _ended(self, name: str, command: list[str]) -> tuple[bool, str, str]:
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
        said = (ended.stdout + ended.stderr).splitlines() or [""]
        return not ended.returncode, name, f"exit status {ended.returncode}: {said[-1][:100]}"
