"""Prompts whose pages are of bigrams, through all tiers, beside prompts of the same tokens that are not."""

import numpy as np

from tests.support.cache import ToyEngine, toy_layout
from tests.support.operations import over, present
from unified_cache.controller import InlineWorkers
from unified_cache.core.page import DEFAULT_NAMESPACE, Namespace, Prompt
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage

PAGE = 4
BIGRAMS = Namespace(bigrams=True)
TOKENS = np.arange(100, 125, dtype=np.int32)


def engine(storage: MemoryStorage | None = None) -> ToyEngine:
    sizes = (16, 16, 16)
    host = sizes if storage is not None else (0, 0, 0)
    return ToyEngine(toy_layout((SPAN_ALL, 2, 1), PAGE), sizes, host, storage, InlineWorkers())


def serve(toy: ToyEngine, prompt: Prompt) -> int:
    """Serve a prompt; return the pages that it resumed from."""
    found = toy.cache.match(prompt)
    lock = present(toy.serve(prompt))
    assert toy.verify(prompt, lock) > 0
    toy.cache.release(lock)
    toy.cache.check()
    return found.device_end


def test_a_prompt_resumes_from_the_pages_whose_pairs_it_shares() -> None:
    toy = engine()
    assert serve(toy, toy.cache.prompt(TOKENS, BIGRAMS)) == 0
    # 24 of the 25 tokens begin a pair that is known. One token less, and the last pair of the last page is not.
    for count, pages in ((25, 6), (24, 5), (9, 2), (8, 1), (5, 1), (4, 0)):
        prompt = toy.cache.prompt(TOKENS[:count], BIGRAMS)
        assert (prompt.pages_count, toy.cache.match(prompt).tree_end) == (pages, pages)
    branched = TOKENS.copy()
    branched[8] = 7  # the second token of the last pair of page 1
    assert toy.cache.match(toy.cache.prompt(branched, BIGRAMS)).tree_end == 1
    # Served, it hangs below the node that it cuts.
    serve(toy, toy.cache.prompt(branched, BIGRAMS))
    assert toy.cache.match(toy.cache.prompt(TOKENS, BIGRAMS)).tree_end == 6


def test_prompts_that_differ_in_their_first_token_alone_share_nothing() -> None:
    toy = engine()
    serve(toy, toy.cache.prompt(TOKENS, BIGRAMS))
    other = TOKENS.copy()
    other[0] = 7
    assert serve(toy, toy.cache.prompt(other, BIGRAMS)) == 0
    assert toy.cache.match(toy.cache.prompt(TOKENS, BIGRAMS)).tree_end == 6


def test_bigrams_and_single_tokens_never_share_a_page() -> None:
    storage = MemoryStorage()
    toy = engine(storage)
    for namespace in (DEFAULT_NAMESPACE, BIGRAMS):
        prompt = toy.cache.prompt(TOKENS, namespace)
        assert serve(toy, prompt) == 0
        over(toy.cache, toy.cache.backup(prompt))
    # The tokens that a tree walks for bigrams are these, and another prompt's all the same.
    assert toy.cache.match(toy.cache.prompt(TOKENS[1:])).tree_end == 0
    assert toy.cache.close() == []


def test_bigrams_come_back_from_storage_byte_by_byte() -> None:
    storage = MemoryStorage()
    writer = engine(storage)
    prompt = writer.cache.prompt(TOKENS, BIGRAMS)
    serve(writer, prompt)
    over(writer.cache, writer.cache.backup(prompt))
    reader = engine(storage)
    for start in (reader.cache.prefetch, reader.cache.load):
        assert start(prompt) is not None
        reader.cache.wait_all(1)
    assert reader.read_back(prompt) == prompt.pages_count == 6
