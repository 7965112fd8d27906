"""``unified-cache faithful`` against a server whose cache lies in ways that no checksum sees, and one that does not."""

import json
import re
import sys
from collections.abc import Iterable

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.toy_completions import ToyFault, toy_server
from unified_cache.cli.main import run
from unified_cache.sizing.faithful.result import FaithfulVerdict, PhaseResult, distance_of
from unified_cache.sizing.faithful.server import ServedAnswer

SMALL = ("--documents", "2", "--facts", "12")
INFINITE, NAN = float("inf"), float("nan")
PHASES = {"device", "branches", "concurrent", "salts", "host"}


def verdicts(url: str, *options: str) -> tuple[int, dict[str, str], str]:
    """Run the command; return its exit status, the verdict of each phase, and its error."""
    said = ask("faithful", url, *SMALL, "--json", *options)
    return said.status, {phase["name"]: phase["verdict"] for phase in json.loads(said.out)["phases"]}, said.err


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
    fault: ToyFault, phases: set[str]
) -> None:
    with toy_server(fault) as url:
        status, found, _ = verdicts(url)
    assert status == 1
    assert {name for name, verdict in found.items() if verdict == "unfaithful"} == phases


def test_a_sound_cache_is_faithful_in_every_phase_and_across_a_restart() -> None:
    with toy_server() as url:
        restart = f"{sys.executable} -c \"import urllib.request as web; web.urlopen('{url}/restart')\""
        status, found, _ = verdicts(url, "--restart-command", restart, "--host-tokens", "100")
    assert (status, set(found.values())) == (0, {"faithful"})
    assert set(found) == PHASES | {"storage", "restart"}


@pytest.mark.parametrize("fault", [ToyFault.NOTHING, ToyFault.NO_METRICS])
def test_a_server_whose_counters_go_on_or_say_nothing_was_not_restarted(fault: ToyFault) -> None:
    with toy_server(fault) as url:
        options = ("--device-tokens", "1600", "--restart-command", f"{sys.executable} -c pass")
        status, found, _ = verdicts(url, *options)
    assert (status, found) == (2, dict.fromkeys(PHASES, "faithful") | {"restart": "cannot tell"})


def test_the_first_tokens_that_documents_share_are_no_hit() -> None:
    words = ("one", "two", "three", "four")
    verdict_of: dict[int, FaithfulVerdict] = {}
    for tokens in (13, 16):
        hit = ServedAnswer("one two three four", words, tuple({word: -0.1} for word in words), 500, tokens)
        verdict_of[tokens] = PhaseResult.of("host", [("prompt", "one", hit, hit)], 0.0).verdict
    assert verdict_of == {13: FaithfulVerdict.CANNOT_TELL, 16: FaithfulVerdict.FAITHFUL}


def skipping(phases: Iterable[str]) -> list[str]:
    """Return the options that leave phases out."""
    return [word for name in sorted(phases) for word in ("--skip", name)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ToyFault.NO_CACHE, "no prompt was a hit"),
        (ToyFault.NO_COUNTERS, "--enable-prompt-tokens-details"),
        (ToyFault.NO_USAGE, "--enable-prompt-tokens-details"),
        (ToyFault.NOISE, "too noisy: cold answers differ by"),
        (ToyFault.NO_SALT, "no cache_salt: no prompt is cold twice"),
    ],
)
def test_what_nobody_can_know_is_not_called_faithful(fault: ToyFault, reason: str) -> None:
    with toy_server(fault) as url:
        status, found, error = verdicts(url)
    assert status == 2
    assert "cannot tell" in found.values()
    assert "unfaithful" not in found.values()
    assert reason in error


def test_the_line_of_the_document_writes_a_file_for_a_bug() -> None:
    text = (ROOT / "docs" / "is-it-working.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^unified-cache (faithful .*) > bug.json$", text, re.MULTILINE)
    with toy_server(ToyFault.STALE) as url:
        said = ask(*line.replace("http://localhost:8000", url).split(), *SMALL)
    assert said.status == 1
    found = json.loads(said.out)
    (host,) = (phase for phase in found["phases"] if phase["name"] == "host")
    assert host["pairs"][0]["other"]["text"] == " nothing of that here"
    assert host["pairs"][0]["fact"] in host["pairs"][0]["cold"]["text"]
    assert found["server"] | {"version": "1.2.3", "num_gpu_blocks": "100"} == found["server"]


def test_no_phase_at_all_tells_nothing() -> None:
    with toy_server() as url:
        assert run(["faithful", url, *SMALL, *skipping(PHASES)]) == 2


@pytest.mark.parametrize("command", ["false", "no-such-program"])
def test_a_restart_that_fails_loses_nothing_of_what_was_measured(command: str) -> None:
    with toy_server() as url:
        status, found, _ = verdicts(url, "--restart-command", command)
    assert (status, found) == (2, dict.fromkeys(PHASES, "faithful") | {"restart": "cannot tell"})


def test_the_output_of_a_restart_is_no_part_of_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    with toy_server() as url:
        run(["faithful", url, *SMALL, *skipping(PHASES), "--restart-command", "echo restarted", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["command"] == "faithful"
    assert "restarted" in err


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
        (ServedAnswer("one three", (), (), 10, 0), INFINITE),
        (answer("one", -0.1), INFINITE),
        (answer("one two three", -0.1, -0.2, -0.1), INFINITE),
        (answer("one three", -0.1, -0.2), 4.8),
        (ServedAnswer("one three", ("one", "two"), answer("one two", -0.1, -0.2).top, 10, 0), INFINITE),
        (ServedAnswer("one three", (), answer("one two", -0.1, -0.2).top, 10, 0), INFINITE),
        (ServedAnswer("one two", ("one", "two"), ({"three": -1.0}, {"two": -0.2}), 10, 0), NAN),
        (ServedAnswer("one two", ("one", "two"), ({"one": None}, {"two": -0.2}), 10, 0), NAN),
        (ServedAnswer("one six", ("one", "six"), ({"one": NAN}, {"six": -0.2}), 10, 0), INFINITE),
    ],
)
def test_a_distance_is_the_largest_of_the_logprobs_or_what_the_other_token_loses(
    other: ServedAnswer, distance: float
) -> None:
    assert distance_of(answer("one two", -0.1, -0.2), other) == pytest.approx(distance, nan_ok=True)


@pytest.mark.parametrize(
    ("token", "distance"),
    [("one", 0.0), ("two", 0.0), ("three", INFINITE)],
)
def test_where_the_cold_answer_has_one_alternative_another_token_is_infinitely_far(token: str, distance: float) -> None:
    tops = {"one": ({"one": -0.1},), "two": ({"one": -0.7, "two": -0.7},), "three": ({"one": -0.1},)}
    cold = ServedAnswer("one", ("one",), tops[token], 10, 0)
    assert distance_of(cold, ServedAnswer(token, (token,), tops[token], 10, 0)) == distance
