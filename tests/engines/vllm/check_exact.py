"""An engine computes from pages of a store what it computes from its own: compared bit by bit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.vllm.engine import EngineAnswer, VllmEngine, prompt_of, running_engine
from tests.engines.vllm.faults import LogPath, ModelPath
from tests.engines.vllm.models import MODELS, checkpoint
from tests.support.mooncake import LocalCluster
from tests.support.running_service import running

NEARLY_WHOLE_TOKENS = 4
"""With as few tokens left to compute, the shapes of matrix products are others than in the engine without a store."""

NEARLY_WHOLE_LOGPROB = 1e-6

PROMPTS = (prompt_of(803, 1), prompt_of(613, 2), prompt_of(259, 3))

Alone = Callable[[str], VllmEngine]


@contextmanager
def store_url(kind: str, directory: Path) -> Iterator[str]:
    """Yield the URL of a new store."""
    match kind:
        case "grpc":
            with running(storage=f"file:{directory}") as service:
                yield f"grpc://{service.address}"
        case "mooncake":
            with LocalCluster.running(nodes=2, segment_bytes=128 << 20) as cluster:
                yield cluster.url
        case _:
            yield f"{kind}:{directory}"


def stored_by_one_engine(
    model: Path, name: str, url: str, log: Path, prompts: Sequence[Sequence[int]]
) -> list[EngineAnswer]:
    """Have an engine compute prompts and store them; it is gone afterwards."""
    with running_engine(model, name, url, log) as engine:
        computed = [engine.completion(prompt) for prompt in prompts]
        assert [each.cached for each in computed] == [0] * len(prompts)
        engine.settle()
        assert engine.counted("store_chunks", answer="stored") > 0
        left = engine.close()
        assert not left.threads
        assert not left.regions
    return computed


def local_hit(engine: VllmEngine, prompt: Sequence[int], cached: int) -> EngineAnswer:
    """Complete a prompt from a local hit of ``cached`` tokens, in an engine without a store."""
    if not cached:
        engine.reset(connector=False)
        return engine.completion(prompt)
    for primed in (prompt, prompt[: cached + 1]):
        engine.reset(connector=False)
        engine.completion(primed)
        found = engine.completion(prompt)
        if found.cached == cached:
            return found
    raise AssertionError(f"no local hit of {cached} tokens of {len(prompt)}, the last has {found.cached}")


def assert_equal(found: EngineAnswer, expected: EngineAnswer, length: int) -> None:
    """Compare two completions of a prompt of ``length`` tokens."""
    bound = NEARLY_WHOLE_LOGPROB if length - found.cached <= NEARLY_WHOLE_TOKENS else 0.0
    assert found.cached == expected.cached
    assert found.difference(expected) <= bound


CASES = (
    *(("llama", kind) for kind in ("file", "packed", "grpc", "mooncake")),
    *(("deepseek_v4", kind) for kind in ("packed", "grpc", "mooncake")),
    *((name, "file") for name in MODELS if name != "llama"),
)
"""Families, and stores that they are tried over."""


@pytest.mark.parametrize(("name", "kind"), CASES)
def check_a_prefix_from_any_store_gives_the_answer_of_a_local_hit(
    name: str, kind: str, model_path: ModelPath, log_path: LogPath, alone: Alone, tmp_path: Path
) -> None:
    with store_url(kind, tmp_path / "store") as url:
        compare_with_local_hits(name, url, model_path(name), log_path, alone(name))


def compare_with_local_hits(name: str, url: str, model: Path, log_path: LogPath, alone: VllmEngine) -> None:
    computed = stored_by_one_engine(model, name, url, log_path("first"), PROMPTS)
    with running_engine(model, name, url, log_path("second")) as engine:
        found = [engine.completion(prompt) for prompt in PROMPTS]
        assert engine.loaded() > 0
        assert not engine.close().regions
    for prompt, hit, first in zip(PROMPTS, found, computed, strict=True):
        assert hit.tokens == first.tokens
        assert hit.cached > 0
        assert_equal(hit, local_hit(alone, prompt, hit.cached), len(prompt))


def check_other_weights_under_the_same_path_miss(model_path: ModelPath, log_path: LogPath, tmp_path: Path) -> None:
    url, model, prompt = f"file:{tmp_path / 'store'}", tmp_path / "model", PROMPTS[0]
    checkpoint(model, "llama", seed=1)
    stored_by_one_engine(model, "llama", url, log_path("first"), [prompt])
    checkpoint(model, "llama", seed=2)
    with running_engine(model, "llama", None, log_path("alone")) as alone:
        expected = alone.completion(prompt)
    with running_engine(model, "llama", url, log_path("second")) as engine:
        found = engine.completion(prompt)
        assert engine.counted("lookup_chunks", answer="hit") == 0
        assert found.cached == 0
        assert found.difference(expected) == 0.0


@pytest.mark.parametrize(("name", "cached"), [("llama", [800, 608]), ("deepseek_v4", [768, 512])])
def check_an_engine_finds_what_one_that_was_killed_has_stored(
    name: str, cached: list[int], model_path: ModelPath, log_path: LogPath, alone: Alone, tmp_path: Path
) -> None:
    url, model = f"file:{tmp_path / 'store'}", model_path(name)
    with running_engine(model, name, url, log_path("first")) as engine:
        for prompt in PROMPTS[:2]:
            engine.completion(prompt)
        engine.settle()
        # The last prompt is on its way to the store, in part or not at all.
        engine.completion(PROMPTS[2])
        engine.kill()
    with running_engine(model, name, url, log_path("second")) as engine:
        found = [engine.completion(prompt) for prompt in PROMPTS]
        assert engine.loaded() > 0
    assert [each.cached for each in found[:2]] == cached
    for prompt, hit in zip(PROMPTS, found, strict=True):
        assert_equal(hit, local_hit(alone(name), prompt, hit.cached), len(prompt))
