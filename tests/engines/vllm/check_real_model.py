"""A model whose answers are words, over HTTP: the same words wherever its KV comes from. The waits are printed."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest

from tests.engines.vllm.engine import CPU_SPEC
from tests.engines.vllm.faults import BOUND_S, LIFE_S, LogPath
from tests.engines.vllm.installation import engine_python
from tests.engines.vllm.real_model import BLOCK_TOKENS, QUESTIONS, real_model, real_prompt, real_variables, serving
from tests.engines.vllm.server import SaidWords, VllmServer
from tests.sources import ROOT
from tests.support.bucket import LocalBucket
from tests.support.cluster import ServeProcess

ANN, BEN, EVE, FAY, GUS = (real_prompt(name) for name in ("Ann", "Ben", "Eve", "Fay", "Gus"))
FAYS = [real_prompt("Fay", question) for question in range(len(QUESTIONS))]
ALIGNED = real_prompt("Hal", length=3 * BLOCK_TOKENS)
SHORT = real_prompt("Ida", length=BLOCK_TOKENS - 1)

STORED = sum(len(prompt) // BLOCK_TOKENS for prompt in (ANN, ANN, BEN, EVE, FAY, ALIGNED))
"""Chunks of what is asked first, Ann's also under a salt, at the least: answers may fill some more."""

SALT, OTHER_SALT = "one user", "another user"


def blocks(prompt: Sequence[int]) -> int:
    """Return the tokens in whole blocks of a prompt."""
    return len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(slots=True)
class Waits:
    """Seconds until the first words, by what was asked, of one kind of store."""

    name: str
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def note(self, line: str, *said: SaidWords) -> list[str]:
        """Keep the waits of some answers; return their words."""
        self.seconds.setdefault(line, []).extend(each.wait_s for each in said)
        return [each.text for each in said]

    def text(self) -> str:
        """Return the table."""
        lines = (f"{line:<42}{median(waits):8.2f}{max(waits):8.2f}" for line, waits in self.seconds.items())
        return "\n".join([f"\n{self.name + ', wait in s':<42}{'median':>8}{'worst':>8}", *lines])


def at_once(server: VllmServer, prompts: Sequence[Sequence[int]]) -> list[SaidWords]:
    """Ask all of them at a time."""
    with ThreadPoolExecutor(len(prompts)) as readers:
        return list(readers.map(server.say, prompts))


def first_life(server: VllmServer, waits: Waits, settle: Callable[[VllmServer], None]) -> dict[str, list[str]]:
    """Ask what no server has computed; return the words."""
    first, ben = server.say(ANN), server.say(BEN)
    assert first.cached == ben.cached == 0
    words = {"Ann": waits.note("computed", first), "Ben": waits.note("computed", ben)}
    again = server.say(ANN)
    assert again.cached == blocks(ANN)
    assert waits.note("the same again, on the device", again) == words["Ann"]
    salted = server.say(ANN, SALT)
    assert (salted.cached, salted.text) == (0, first.text)
    server.abandon(EVE)
    words["Eve"] = [server.say(EVE).text]
    words["short"] = [server.say(SHORT).text]
    words["aligned"] = [server.say(ALIGNED).text]
    server.say(FAY)
    words["Fay"] = waits.note("8 at a time, on the device", *at_once(server, FAYS))
    settle(server)
    return words


def second_life(server: VllmServer, waits: Waits, words: dict[str, list[str]]) -> None:
    """Ask another server for the same, which has to come from the store."""
    ann = server.say(ANN)
    assert ann.cached == blocks(ANN)
    assert waits.note("restarted", ann) == words["Ann"]
    eight = at_once(server, FAYS)
    assert waits.note("restarted, 8 at a time", *eight) == words["Fay"]
    assert all(each.cached == blocks(FAY) for each in eight)
    salted, other = server.say(ANN, SALT), server.say(ANN, OTHER_SALT)
    assert waits.note("restarted, under its salt", salted) == words["Ann"]
    assert waits.note("restarted, under another salt: computed", other) == words["Ann"]
    assert (salted.cached, other.cached) == (blocks(ANN), 0)
    server.abandon(EVE)
    eve, short, aligned = server.say(EVE), server.say(SHORT), server.say(ALIGNED)
    assert (eve.cached, short.cached) == (blocks(EVE), 0)
    # The last token is computed in any case, at times with its whole block.
    assert aligned.cached >= len(ALIGNED) - BLOCK_TOKENS
    assert [[each.text] for each in (eve, short, aligned)] == [words[name] for name in ("Eve", "short", "aligned")]


@pytest.fixture(params=["file:", "s3:", "s3:#compress=lossless"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], None]]:
    """Return the URL of a store, and what removes it, or ends the server that has it."""
    scheme, fragment = request.param.split(":")
    if scheme == "file":
        return f"file:{tmp_path / 'store'}", lambda: shutil.rmtree(tmp_path / "store")
    bucket: LocalBucket = request.getfixturevalue("own_bucket")
    return bucket.new_url() + fragment, bucket.kill


@pytest.fixture
def own_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBucket]:
    """Yield a bucket that may be killed; servers find it by the environment."""
    with LocalBucket.running() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        yield bucket


def check_words_are_the_same_after_a_restart_and_without_the_store(
    log_path: LogPath, store: tuple[str, Callable[[], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, remove_store = store
    waits = Waits(url)
    with serving(log_path("first"), url) as server:
        words = first_life(server, waits, lambda server: server.settle(STORED))
        server.stop()
    with serving(log_path("second"), url) as server:
        second_life(server, waits, words)
        loaded = server.metric("vllm:unified_cache_load_chunks_total", answer="hit")
        assert loaded >= STORED - len(BEN) // BLOCK_TOKENS - 1
        assert server.metric("vllm:external_prefix_cache_hits_total") >= (loaded - 1) * BLOCK_TOKENS
        remove_store()
        ben = server.say(BEN)
        assert (ben.cached, waits.note("its store removed: computed", ben)) == (0, words["Ben"])
        assert server.say(ANN).text == words["Ann"][0]
    with capsys.disabled():
        print(waits.text())  # noqa: T201 - for who compares


def check_the_fs_tier_of_vllm_beside_it(log_path: LogPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def settle(server: VllmServer) -> None:
        until_s = time.monotonic() + BOUND_S * 10
        while sum(path.is_file() for path in tmp_path.rglob("*.bin")) < STORED:
            assert time.monotonic() < until_s
            server.say(SHORT, tokens=1)

    waits, tiers = Waits("vLLM's fs tier"), [{"type": "fs", "root_dir": str(tmp_path / "fs")}]
    with serving(log_path("first"), tiers=tiers) as server:
        words = first_life(server, waits, settle)
        server.stop()
    with serving(log_path("second"), tiers=tiers) as server:
        second_life(server, waits, words)
    with capsys.disabled():
        print(waits.text())  # noqa: T201 - for who compares


def check_a_service_that_is_killed_and_comes_back_changes_no_word(
    log_path: LogPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service, waits = ServeProcess(variables={"STORAGE": f"file:{tmp_path / 'store'}"}), Waits("grpc://")
    try:
        with serving(log_path("server"), f"grpc://{service.address}") as server:
            words = waits.note("computed", server.say(ANN))
            server.settle(len(ANN) // BLOCK_TOKENS)
            server.reset()
            found = server.say(ANN)
            assert (found.cached, waits.note("from the service", found)) == (blocks(ANN), words)
            server.reset()
            service.kill()
            killed = server.say(ANN)
            assert (killed.cached, waits.note("the service killed: computed", killed)) == (0, words)
            gus = server.say(GUS)
            service.start()
            server.reset()
            until_s = time.monotonic() + 10 * BOUND_S
            while (back := server.say(ANN)).cached < blocks(ANN):
                assert (back.text, time.monotonic() < until_s) == (words[0], True)
                server.reset()
            assert waits.note("the service back", back) == words
            assert server.say(GUS).text == gus.text
    finally:
        service.kill()
    with capsys.disabled():
        print(waits.text())  # noqa: T201 - for who compares


EXAMPLE = f"""import sys
from examples.vllm_restart import CONNECTOR, main

CONNECTOR["kv_connector_extra_config"].update({CPU_SPEC!r})
main(*sys.argv[1:])
"""
"""The example, with what vLLM lacks on a machine without a GPU."""


def check_the_example_reads_a_document_once(tmp_path: Path) -> None:
    document = tmp_path / "document"
    document.write_text((ROOT / "LICENSE").read_text()[:2400])
    command = [str(engine_python()), "-c", EXAMPLE, str(real_model()), str(document)]
    cached: list[int] = []
    for _ in range(2):
        ran = subprocess.run(
            command, check=True, cwd=tmp_path, env=real_variables(), capture_output=True, text=True, timeout=2 * LIFE_S
        )
        cached += map(int, re.findall(r"s, (\d+) of \d+ tokens not computed", ran.stdout))
    assert cached[0] == 0
    assert cached[1] == cached[2] == cached[3] > 0
