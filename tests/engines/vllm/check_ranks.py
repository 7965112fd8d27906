"""Two ranks of one engine, processes over gloo: each copies its part of a chunk, and one tier moves all of it."""

from pathlib import Path

import pytest

from tests.engines.vllm.check_exact import PROMPTS, assert_equal, local_hit
from tests.engines.vllm.engine import running_engine
from tests.engines.vllm.faults import LogPath, ModelPath

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

BLOCK_TOKENS = 32
"""Of a chunk of this family."""


@pytest.mark.parametrize("kind", ["file", "packed"])
def check_a_prefix_that_two_ranks_stored_gives_two_others_the_answer_of_a_local_hit(
    kind: str, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    url, model, prompts = f"{kind}:{tmp_path / 'store'}", model_path("llama"), PROMPTS[1:]
    cached = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]
    with running_engine(model, "llama", None, log_path("alone"), options=TWO_RANKS) as alone:
        expected = [local_hit(alone, prompt, tokens) for prompt, tokens in zip(prompts, cached, strict=True)]
    with running_engine(model, "llama", url, log_path("first"), options=TWO_RANKS) as engine:
        assert [engine.completion(prompt).cached for prompt in prompts] == [0] * len(prompts)
        engine.settle()
        assert engine.counted("store_chunks", answer="stored") == sum(cached) / BLOCK_TOKENS
        left = engine.close()
        assert left.threads == left.regions == ()
        assert not left.slab_bytes
    assert "world_size=2 rank=1" in log_path("first").read_text()
    with running_engine(model, "llama", url, log_path("second"), options=TWO_RANKS) as engine:
        found = [engine.completion(prompt) for prompt in prompts]
        assert engine.loaded() == sum(cached) / BLOCK_TOKENS
    for prompt, hit, local in zip(prompts, found, expected, strict=True):
        assert_equal(hit, local, len(prompt))
    with running_engine(model, "llama", url, log_path("one_rank")) as engine:
        # Its chunks would be twice the heads of one rank, in another order.
        assert engine.completion(prompts[0]).cached == 0
        assert engine.counted("lookup_chunks", answer="hit") == 0
