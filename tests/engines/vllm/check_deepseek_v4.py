"""DeepSeek-V4, whose KV cache has five groups: what no other family shows. ``check_exact`` has what all of them show.

group   holds                                         tokens of a chunk   needed of it by a resume
0, 1    latents of every layer's window of 128        64                  2 chunks
2       compressed latents, and keys of indexers      256                 all
3       states of the compressors by 4                4                   2 chunks
4       states of the compressor by 128               8                   16 chunks
"""

from pathlib import Path

from tests.engines.vllm.check_exact import PROMPTS, Alone, assert_equal, local_hit, stored_by_one_engine
from tests.engines.vllm.engine import prompt_of, running_engine
from tests.engines.vllm.faults import LogPath, ModelPath

FAMILY = "deepseek_v4"

BLOCK_TOKENS = 256
"""Tokens of a block, whatever the user says: vLLM's kernels take no other."""

SELECTING = prompt_of(2371, 4)
"""With more than 512 entries compressed by 4, so that the indexers' keys decide what is attended to."""


def check_the_answer_depends_on_what_is_far_back(alone: Alone) -> None:
    alone(FAMILY).reset(connector=False)
    prompt = PROMPTS[0]
    changed = [*prompt_of(BLOCK_TOKENS, 7), *prompt[BLOCK_TOKENS:]]
    first, other = alone(FAMILY).completion(prompt), alone(FAMILY).completion(changed)
    assert first.cached == other.cached == 0
    assert first.logprobs[0] != other.logprobs[0]


def check_an_indexer_selects_by_keys_from_the_store(
    model_path: ModelPath, log_path: LogPath, alone: Alone, tmp_path: Path
) -> None:
    url, model = f"file:{tmp_path / 'store'}", model_path(FAMILY)
    (computed,) = stored_by_one_engine(model, FAMILY, url, log_path("first"), [SELECTING])
    with running_engine(model, FAMILY, url, log_path("second")) as engine:
        found = engine.completion(SELECTING)
        assert engine.loaded() > 0
    assert found.cached == 2304
    assert found.tokens == computed.tokens
    assert_equal(found, local_hit(alone(FAMILY), SELECTING, found.cached), len(SELECTING))


def check_a_branch_finds_the_windows_that_the_engine_kept(
    model_path: ModelPath, log_path: LogPath, alone: Alone, tmp_path: Path
) -> None:
    url, model = f"file:{tmp_path / 'store'}", model_path(FAMILY)
    kept = {"prefix_cache_retention_interval": BLOCK_TOKENS}
    branch = [*PROMPTS[0][:520], *prompt_of(90, 8)]
    with running_engine(model, FAMILY, url, log_path("first"), options=kept) as engine:
        engine.completion(PROMPTS[0])
        engine.settle()
    with running_engine(model, FAMILY, url, log_path("second"), options=kept) as engine:
        found = engine.completion(branch)
    assert found.cached == 512
    assert_equal(found, local_hit(alone(FAMILY), branch, found.cached), len(branch))
