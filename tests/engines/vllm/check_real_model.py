"""A model whose answers are words, over HTTP: the same words wherever its KV comes from."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.vllm.engine import CPU_SPEC
from tests.engines.vllm.faults import LIFE_S, LogPath
from tests.engines.vllm.installation import engine_python
from tests.engines.vllm.real_model import BLOCK_TOKENS, QUESTIONS, real_model, real_prompt, real_variables, serving
from tests.engines.vllm.server import SaidWords, VllmServer
from tests.sources import ROOT
from tests.support.bucket import LocalBucket

ANN, BEN, EVE, FAY = (real_prompt(name) for name in ("Ann", "Ben", "Eve", "Fay"))
FAYS = [real_prompt("Fay", question) for question in range(len(QUESTIONS))]
ALIGNED = real_prompt("Hal", length=3 * BLOCK_TOKENS)
SHORT = real_prompt("Ida", length=BLOCK_TOKENS - 1)

STORED = sum(len(prompt) // BLOCK_TOKENS for prompt in (ANN, ANN, BEN, EVE, FAY, ALIGNED))
"""Chunks of what is asked first, Ann's also under a salt, at the least: answers may fill some more."""

SALT, OTHER_SALT = "one user", "another user"


def blocks(prompt: Sequence[int]) -> int:
    """Return the tokens in whole blocks of a prompt."""
    return len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS


def at_once(server: VllmServer, prompts: Sequence[Sequence[int]]) -> list[SaidWords]:
    """Ask all of them at a time."""
    with ThreadPoolExecutor(len(prompts)) as readers:
        return list(readers.map(server.say, prompts))


def first_life(server: VllmServer) -> dict[str, list[str]]:
    """Ask what no server has computed; return the words."""
    ann, ben = server.say(ANN), server.say(BEN)
    assert ann.cached == ben.cached == 0
    assert server.say(ANN) == (ann.text, blocks(ANN))
    assert server.say(ANN, SALT) == ann
    server.abandon(EVE)
    eve, short, aligned = server.say(EVE), server.say(SHORT), server.say(ALIGNED)
    server.say(FAY)
    fays = at_once(server, FAYS)
    server.settle(STORED)
    said = {"Ann": [ann], "Ben": [ben], "others": [eve, short, aligned], "Fay": fays}
    return {name: [each.text for each in answers] for name, answers in said.items()}


def second_life(server: VllmServer, words: dict[str, list[str]]) -> None:
    """Ask another server for the same, which has to come from the store."""
    (ann,) = words["Ann"]
    assert server.say(ANN) == (ann, blocks(ANN))
    assert at_once(server, FAYS) == [(text, blocks(FAY)) for text in words["Fay"]]
    assert server.say(ANN, SALT) == (ann, blocks(ANN))
    assert server.say(ANN, OTHER_SALT) == (ann, 0)
    server.abandon(EVE)
    eve, short, aligned = server.say(EVE), server.say(SHORT), server.say(ALIGNED)
    assert (eve.cached, short.cached) == (blocks(EVE), 0)
    # The last token is computed in any case, at times with its whole block.
    assert aligned.cached >= len(ALIGNED) - BLOCK_TOKENS
    assert [each.text for each in (eve, short, aligned)] == words["others"]


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
    log_path: LogPath, store: tuple[str, Callable[[], None]]
) -> None:
    url, remove_store = store
    with serving(log_path("first"), url) as server:
        words = first_life(server)
        server.stop()
    with serving(log_path("second"), url) as server:
        second_life(server, words)
        loaded = server.metric("vllm:unified_cache_load_chunks_total", answer="hit")
        assert loaded >= STORED - len(BEN) // BLOCK_TOKENS - 1
        assert server.metric("vllm:external_prefix_cache_hits_total") >= (loaded - 1) * BLOCK_TOKENS
        remove_store()
        assert server.say(BEN) == (*words["Ben"], 0)
        assert server.say(ANN).text == words["Ann"][0]


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
