"""The examples run as they stand, and show what they say: each rung, over a store that is given."""

import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.sources import ROOT
from unified_cache.testing.tiny_models import tiny_model


def example(name: str, *options: str) -> list[str]:
    """Run an example in this process, which has imported torch, and return its output."""
    path = str(ROOT / "examples" / f"{name}.py")
    out = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setattr(sys, "argv", [path, *options])
        runpy.run_path(path, run_name="__main__")
    return out.getvalue().splitlines()


def test_memory_only_computes_what_is_new() -> None:
    assert example("memory_only") == ["0 tokens reused, 82 computed", "96 tokens reused, 31 computed"]


def test_host_and_file_survives_a_restart(tmp_path: Path) -> None:
    """Rung 2: an engine with three tiers, and another one after it."""
    lines = example("host_and_file", "--storage", f"file:{tmp_path}")
    assert "192 from host;" in lines[-2]
    assert "192 from storage;" in lines[-1]


def test_two_engines_share_one_store(tmp_path: Path) -> None:
    """Rung 3: two processes at a time, of which the second imports the program that runs in this one."""
    lines = example("two_engines", "--storage", f"file:{tmp_path}")
    assert lines[0].startswith("engine 1: 0 tokens from storage")
    assert [line.split(" tokens")[0] for line in lines[2:]] == ["engine 2: 240", "engine 2: 240"]


def test_kv_events_show_the_pages_of_each_tier() -> None:
    assert example("kv_events") == ["GPU: 6 pages, CPU: 6 pages, STORAGE: 6 pages", "STORAGE: 6 pages"]


def test_hybrid_engine_resumes_three_kinds_of_state_from_every_tier() -> None:
    assert example("hybrid_engine") == [
        "cold: 0 of 10 pages reused",
        "another prompt: 0 of 10",
        "continued, from host memory: 10 of 11",
        "restarted, from storage: 9 of 10",
        "looking at a cat: 0 of 10",
        "looking at a dog: 2 of 10",
        "looking at a cat: 9 of 10",
    ]


def test_continuous_batching_computes_nothing_twice() -> None:
    assert example("continuous_batching") == [
        "first time: 0 tokens reused, 698 computed",
        "second time: 688 tokens reused, 10 computed",
    ]


def test_the_paged_engine_goes_on_after_a_restart() -> None:
    assert example("paged_engine")[1:] == [
        "next turn: 11 from device",
        "after a restart: 11 from storage",
    ]


def test_a_checkpoint_answers_from_storage_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(WordLevel({"?": 0, "It": 1, "was": 2, "a": 3, "dark": 4, "night": 5}, "?"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="?")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    tiny_model("tiny-llama").save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "document").write_text("It was a dark night " * 40)
    monkeypatch.chdir(tmp_path)
    first, second = ("\n".join(example("real_model", "checkpoint", "document")) for _ in range(2))
    assert "from storage" not in first
    assert "192 from storage;" in second


def test_every_example_is_executed() -> None:
    executed = {
        *("memory_only", "host_and_file", "two_engines", "kv_events", "hybrid_engine"),
        *("continuous_batching", "paged_engine", "real_model"),
    }
    executed.add("vllm_restart")  # under vLLM, by tests/engines/vllm/check_real_model.py
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == executed
