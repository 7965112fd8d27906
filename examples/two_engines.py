"""Example 3: two engine processes and one store. The second engine restores what the first has computed.

python examples/two_engines.py
python examples/two_engines.py --storage file:/tmp/kv
"""
# ruff: noqa: T201 - an example prints to standard output

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory

from unified_cache import CacheConfig, Identity, UnifiedCache, open_storage
from unified_cache.core.pool import Hits
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel
from unified_cache.testing.tiny_models import tiny_model

MODEL = "tiny-gemma3"
SYSTEM = b"You are the clerk of a small library of machines. Answer in one line. " * 3
QUESTIONS = (b"Where is the map of the harbour?", b"Who has drawn the map of the harbour?")
WAIT_S = 120.0

Said = tuple[list[int], Hits, int]
"""An answer, what was reused of its prompt, and how many tokens were computed."""


def serve(engine: PrefixCachedModel, prompts: list[list[int]]) -> list[Said]:
    """Answer all prompts; what was inserted is in the store afterwards."""
    said: list[Said] = []
    for prompt in prompts:
        run = engine.generate(prompt, tokens_max=16)
        for _ in run:
            pass
        assert run.answer is not None
        said.append((list(run.answer.tokens), run.answer.reused, run.answer.computed_tokens))
    engine.cache.wait_all(timeout_s=WAIT_S)
    return said


@contextmanager
def engine_on(storage: str) -> Iterator[PrefixCachedModel]:
    """Open an engine of this process over the store that both share."""
    model = tiny_model(MODEL)
    config = CacheConfig(device_pages=(64, 64), host_pages=(256, 256))
    pages = KeptState.of(model, page_size=16).allocate(config.device_pages)
    with UnifiedCache.open(
        pages.layout, config, pages.pools, identity=Identity(MODEL), storage=open_storage(storage)
    ) as cache:
        yield PrefixCachedModel(model, cache, pages, chunk_tokens=16)


def engine_process(storage: str, line: Connection) -> None:
    """Serve the prompts of each message in a process of its own, until an empty message comes."""
    with engine_on(storage) as engine:
        while prompts := line.recv():
            line.send(serve(engine, prompts))


def show(name: str, answers: list[Said]) -> None:
    """Say what the answers took."""
    for _, reused, computed_tokens in answers:
        print(f"{name}: {reused.storage} tokens from storage, {computed_tokens} computed")


def main(storage: str) -> None:
    """Run the engine of this process, then another process's, while the first engine is still there."""
    prompts = [list(SYSTEM + question) for question in QUESTIONS]
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    other = spawn.Process(target=engine_process, args=(storage, theirs), daemon=True)
    other.start()
    with engine_on(storage) as engine:
        first = serve(engine, prompts)
        show("engine 1", first)
        ours.send(prompts)
        assert ours.poll(WAIT_S), "engine 2 does not answer"
        second: list[Said] = ours.recv()
        show("engine 2", second)
        ours.send([])
        other.join(WAIT_S)
    assert other.exitcode == 0, "an engine has failed"
    assert [answer for answer, *_ in first] == [answer for answer, *_ in second], "a hit is never wrong bytes"
    assert all(reused.storage for _, reused, _ in second), "the store was not shared"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--storage", metavar="URL", help="store (L3); a temporary directory if absent")
    given: str | None = parser.parse_args().storage
    if given is not None:
        main(given)
    else:
        with TemporaryDirectory() as directory:
            main(f"file:{directory}")
