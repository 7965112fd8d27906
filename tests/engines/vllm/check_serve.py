"""docs/vllm.md as a user reads it: launched as a server over HTTP, looked at, killed, and launched again."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from shutil import copytree

import pytest

from tests.engines.vllm.engine import CPU_SPEC, HOST_BYTES, prompt_of
from tests.engines.vllm.faults import DEADLINE_S, LogPath, ModelPath
from tests.engines.vllm.installation import engine_python
from tests.engines.vllm.real_model import real_variables
from tests.engines.vllm.server import VllmServer, running_server, write_tokenizer
from tests.support.cluster import ask
from tests.support.vllm_document import COMMANDS, EXTRA, METRICS, launch_of

SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager")
"""Options of vLLM's for a small machine; the others are for what checks ask."""

ASKED = ("--enable-prompt-tokens-details", "--max-num-seqs", "4")

PROMPTS = (prompt_of(803, 1), prompt_of(613, 2))
CHUNKS = 803 // 32 + 613 // 32

SHUTDOWN_S = 60.0
"""Of a server that has nothing to do: close_timeout_s, and vLLM's own time."""


@pytest.fixture
def launched(
    model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> Callable[[str], AbstractContextManager[VllmServer]]:
    """Return what launches the document's line: over a store here, and with host memory for a small machine."""
    model = copytree(model_path("llama"), tmp_path / "model")
    write_tokenizer(model)
    url = f"file:{tmp_path / 'store'}"
    keys = {**CPU_SPEC, "cpu_bytes_to_use": HOST_BYTES, "deadline_s": DEADLINE_S}
    _, _, name, *options = launch_of(model, url=url, **keys)
    command = (str(engine_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", name, *options)
    return lambda name: running_server([*command, *SMALL, *ASKED], real_variables(), log_path(name))


def check_the_launch_line_serves_a_prompt_of_a_killed_server_from_the_store(
    launched: Callable[[str], AbstractContextManager[VllmServer]], tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'store'}"
    with launched("first") as server:
        computed = [server.completion(prompt) for prompt in PROMPTS]
        assert [each.cached for each in computed] == [0, 0]
        server.settle(CHUNKS)
        # One more is on its way to the store, in part or not at all.
        server.completion(prompt_of(700, 3), tokens=1)
        server.kill()
        # Nothing of vLLM's unlinks it: the document says so.
        assert len(server.regions()) == 1

    with launched("second") as server:
        assert server.metric("vllm:unified_cache_load_chunks_total", answer="hit") == 0
        found = [server.completion(prompt) for prompt in PROMPTS]
        again = [server.completion(prompt) for prompt in PROMPTS]
        server.completion([3, 4], tokens=1)

        # The same tokens as computed, and bit by bit what a hit on the device of the same length gives.
        assert [each.tokens for each in found] == [each.tokens for each in computed]
        assert [each.cached for each in found] == [each.cached for each in again] == [800, 608]
        assert [hit.difference(local) for hit, local in zip(found, again, strict=True)] == [0.0, 0.0]

        _check_metrics(server)
        _check_store_commands(url)
        assert server.stop() < SHUTDOWN_S
        # The engine has ended by itself, and took its host memory along.
        assert "force killing" not in server.log.read_text(errors="replace")
        assert not server.regions()
    _check_store_commands(url)


def _check_metrics(server: VllmServer) -> None:
    """See that ``/metrics`` has what the document names, and that vLLM's own figures agree with ours."""
    text = server.metrics_text()
    defined = {name.removesuffix("_total") for name in re.findall(r"^# HELP (vllm:\w+)", text, re.MULTILINE)}
    assert defined >= METRICS
    assert server.metric("vllm:unified_cache_load_chunks_total", answer="hit") == CHUNKS
    assert server.metric("vllm:unified_cache_lookup_chunks_total", answer="hit") == CHUNKS
    assert server.metric("vllm:unified_cache_registered") == 1
    assert server.metric("vllm:unified_cache_breaker_open") == 0
    assert server.metric("vllm:external_prefix_cache_hits_total") == 800 + 608
    assert server.metric("vllm:kv_offload_tiering_chunk_hits_total", tier="1:UnifiedCacheTier") == CHUNKS
    assert server.metric("vllm:kv_offload_tiering_read_bytes_total", tier="1:UnifiedCacheTier") > 0
    assert server.metric("vllm:kv_offload_tiering_promotion_job_failures_total") == 0


def _check_store_commands(url: str) -> None:
    """Run the document's commands over the store that vLLM wrote."""
    documented = str(EXTRA["url"])
    printed: dict[str, str] = {}
    for command in (each for each in COMMANDS if each[0] == "unified-cache"):
        assert documented in command
        said = ask(*(url if word == documented else word for word in command[1:]))
        assert said.status == 0, said.err
        printed[command[2]] = said.out
    assert set(printed) == {"stat", "verify"}
    for fact in ("float32", "weights", "sha256", "FullAttentionSpec", "vllm 0.31 to 0.33"):
        assert fact in printed["stat"], printed["stat"]
    row = re.search(r" (\d+) +[\d.]+ \w+ +(\d+) +(\d+) +(\d+) ", printed["verify"])
    assert row is not None, printed["verify"]
    objects, sound, flawed, unreadable = map(int, row.groups())
    assert objects == sound >= CHUNKS
    assert flawed == unreadable == 0
