"""Example 2: host memory and a store behind the device. A restarted engine restores what was computed before.

python examples/host_and_file.py
python examples/host_and_file.py --storage file:/tmp/kv
"""
# ruff: noqa: T201 - an example prints to standard output

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from unified_cache import CacheConfig, Identity, UnifiedCache, open_storage
from unified_cache.core.config import WritePolicy
from unified_cache.integrations.transformers import Completion, KeptState, PrefixCachedModel
from unified_cache.testing.tiny_models import tiny_model

MODEL = tiny_model("tiny-gpt-oss")
PROMPT = list(b"You are the clerk of a small library of machines. " * 4)


@contextmanager
def engine(storage: str) -> Iterator[PrefixCachedModel]:
    """Open an engine with three tiers; this model keeps two kinds of state, so each tier has two numbers of pages."""
    config = CacheConfig(device_pages=(32, 32), host_pages=(256, 256), write=WritePolicy.THROUGH)
    pages = KeptState.of(MODEL, page_size=16).allocate(config.device_pages)
    with UnifiedCache.open(
        pages.layout, config, pages.pools, identity=Identity("tiny-gpt-oss"), storage=open_storage(storage)
    ) as cache:
        yield PrefixCachedModel(MODEL, cache, pages, chunk_tokens=16)
        cache.wait_all(timeout_s=30)  # what was inserted is stored by now; close would see to it, too


def ask(engine: PrefixCachedModel, prompt: list[int]) -> Completion:
    """Answer a prompt, and print which tier its prefix came from."""
    run = engine.generate(prompt, tokens_max=16)
    for _ in run:
        pass
    assert run.answer is not None
    print(
        f"reused: {run.answer.reused}; {run.answer.computed_tokens} computed, {run.answer.first_token_s * 1e3:.0f} ms"
    )
    return run.answer


def main(storage: str) -> None:
    """Ask cold; ask after others have claimed the device; restart and ask again."""
    with engine(storage) as first:
        cold = ask(first, PROMPT)
        for tenant in range(3):
            ask(first, [tenant, *PROMPT[1:]])
        from_host = ask(first, PROMPT)
    with engine(storage) as second:
        from_storage = ask(second, PROMPT)
    assert cold.tokens == from_host.tokens == from_storage.tokens, "a hit is never wrong bytes"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--storage", metavar="URL", help="store (L3); a temporary directory if absent")
    given: str | None = parser.parse_args().storage
    if given is not None:
        main(given)
    else:
        with TemporaryDirectory() as directory:
            main(f"file:{directory}")
