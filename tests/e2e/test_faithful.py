"""``unified-cache faithful`` against a server whose cache lies in ways that no checksum sees, and one that does not."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.sources import ROOT
from tests.support.exactness import FAMILIES, page_size_of
from tests.support.model_completions import ModelFault, model_server
from tests.support.toy_completions import ToyFault, toy_server
from unified_cache.cli.main import run
from unified_cache.sizing.faithful.result import distance_of
from unified_cache.sizing.faithful.server import ServedAnswer

FACT_TOKENS = 8
DTYPES = (torch.float32, torch.bfloat16)
FAST = ("tiny-llama", torch.float32)
SMALL = ("--documents", "2", "--facts", "12")
PHASES = {"device", "branches", "aligned", "concurrent", "salts", "host"}


def verdicts(url: str, directory: Path, *options: str) -> tuple[int, dict[str, str]]:
    """Run the command; return its exit status and the verdict of each phase."""
    file = directory / "verdicts.json"
    status = run(["faithful", url, *SMALL, "--json-file", str(file), *options])
    value = json.loads(file.read_text())
    return status, {phase["name"]: phase["verdict"] for phase in value["phases"]}


@pytest.mark.parametrize(
    ("fault", "phases"),
    [
        (ToyFault.STALE, {"host"}),
        (ToyFault.OTHERS, {"host"}),
        (ToyFault.IGNORED_SALT, {"salts"}),
        (ToyFault.SHORT_WINDOW, {"device", "concurrent", "salts", "host"}),
    ],
)
def test_a_cache_that_hands_out_other_pages_is_unfaithful_in_the_phases_that_it_lies_in(
    fault: ToyFault, phases: set[str], tmp_path: Path
) -> None:
    with toy_server(fault) as url:
        status, found = verdicts(url, tmp_path)
    assert status == 1
    assert {name for name, verdict in found.items() if verdict == "unfaithful"} == phases


def test_a_sound_cache_is_faithful_in_every_phase_and_across_a_restart(tmp_path: Path) -> None:
    with toy_server() as url:
        restart = f"{sys.executable} -c \"import urllib.request as web; web.urlopen('{url}/restart')\""
        status, found = verdicts(url, tmp_path, "--restart-command", restart, "--host-tokens", "100")
    assert (status, set(found.values())) == (0, {"faithful"})
    assert set(found) == PHASES | {"storage", "restart"}


def test_a_server_whose_counters_go_on_was_not_restarted(tmp_path: Path) -> None:
    with toy_server() as url:
        status, found = verdicts(url, tmp_path, "--restart-command", f"{sys.executable} -c pass")
    assert (status, found["restart"]) == (2, "cannot tell")


def engine_verdicts(family: str, url: str, directory: Path, *options: str) -> tuple[int, dict[str, str]]:
    """Run the command about documents of three pages and a half; the engine is exact, so next to nothing is noise."""
    facts = str(3 * page_size_of(family) // FACT_TOKENS)
    return verdicts(url, directory, "--facts", facts, "--answer-tokens", "6", "--tolerance", "1e-6", *options)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family, dtype) == FAST else pytest.mark.long)
        for family in FAMILIES
        for dtype in DTYPES
    ],
    ids=str,
)
def test_the_example_engine_is_faithful_with_every_layout(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_server(family, dtype, ModelFault.NOTHING, monkeypatch.setattr) as url:
        status, found = engine_verdicts(family, url, tmp_path)
    assert (status, found) == (0, dict.fromkeys(PHASES, "faithful"))


@pytest.mark.parametrize(
    ("family", "fault", "dtype"),
    [
        ("tiny-llama", ModelFault.STALE, torch.float32),
        *(
            pytest.param(family, fault, dtype, marks=pytest.mark.long)
            for family, fault in (
                ("tiny-llama", ModelFault.OTHERS),
                ("tiny-llama", ModelFault.SWAPPED),
                ("tiny-llama", ModelFault.ZEROS),
                ("tiny-gemma3", ModelFault.SHORT),
                ("tiny-qwen3-next", ModelFault.STATE),
            )
            for dtype in DTYPES
        ),
    ],
    ids=str,
)
def test_the_example_engine_is_unfaithful_where_a_hit_mixes_pages_up(
    family: str, fault: ModelFault, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = [word for name in sorted(PHASES - {"host"}) for word in ("--skip", name)]
    with model_server(family, dtype, fault, monkeypatch.setattr) as url:
        status, found = engine_verdicts(family, url, tmp_path, *skipped)
    assert (status, found) == (1, {"host": "unfaithful"})


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ToyFault.NO_CACHE, "no hit seen in the server's counters"),
        (ToyFault.NO_COUNTERS, "the server counts no cached tokens"),
        (ToyFault.NOISE, "too noisy: cold answers differ by"),
        (ToyFault.NO_SALT, "no cache_salt: no prompt is cold twice"),
    ],
)
def test_what_nobody_can_know_is_not_called_faithful(
    fault: ToyFault, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with toy_server(fault) as url:
        status, found = verdicts(url, tmp_path)
    assert status == 2
    assert "cannot tell" in found.values()
    assert "unfaithful" not in found.values()
    assert reason in capsys.readouterr().err


def test_the_line_of_the_document_writes_a_page_for_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "is-it-working.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^unified-cache (faithful .*)$", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with toy_server(ToyFault.STALE) as url:
        assert run([*line.replace("http://localhost:8000", url).split(), *SMALL]) == 1
    page = (tmp_path / "bug" / "index.html").read_text()
    for words in ("Once more: Locker", "nothing of that here", "parts at character", "1.2.3", "num_gpu_blocks"):
        assert words in page


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("http://127.0.0.1:9",), 1),
        (("localhost:8000",), 2),
        (("http://127.0.0.1:9", "--skip", "host", "--skip", "hoist"), 2),
    ],
)
def test_what_cannot_be_asked_is_an_error_of_one_line(
    options: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["faithful", *options]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_no_phase_at_all_tells_nothing() -> None:
    with toy_server() as url:
        assert run(["faithful", url, *SMALL, *(word for name in PHASES for word in ("--skip", name))]) == 2


def test_a_model_that_the_server_lacks_and_a_restart_that_fails_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_server() as url:
        assert run(["faithful", url, "--model", "other"]) == 2
        assert "has the models toy, expected other" in capsys.readouterr().err
        skipped = [word for name in sorted(PHASES) for word in ("--skip", name)]
        assert run(["faithful", url, *SMALL, *skipped, "--restart-command", "false"]) == 2
        assert "--restart-command ended with 1, expected 0" in capsys.readouterr().err


def answer(words: str, *logprobs: float) -> ServedAnswer:
    tokens = tuple(words.split())
    top = tuple({token: value, "else": -5.0} for token, value in zip(tokens, logprobs, strict=True))
    return ServedAnswer(words, tokens, top, 10, 0)


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (answer("one two", -0.1, -0.2), 0.0),
        (answer("one two", -0.2, -0.4), 0.2),
        (answer("one else", -0.1, -0.4), 4.8),
        (ServedAnswer("one two", (), (), 10, 0), 0.0),
        (ServedAnswer("one three", (), (), 10, 0), float("inf")),
    ],
)
def test_a_distance_is_the_largest_of_the_logprobs_or_what_the_other_token_loses(
    other: ServedAnswer, distance: float
) -> None:
    assert distance_of(answer("one two", -0.1, -0.2), other) == pytest.approx(distance)
