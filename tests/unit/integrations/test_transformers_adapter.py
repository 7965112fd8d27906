"""Stock models over the cache: sizes, the seam between cache objects and pages, answers, and what is refused."""

import hashlib
import random
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Cache,
    DynamicCache,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import StaticLayer

from tests.support.exactness import (
    EVERYWHERE,
    FAMILIES,
    L3,
    PAGES,
    TIGHT,
    CacheSizes,
    assert_at_rest,
    chunk_ends,
    engine,
    forward,
    go_on,
    is_equal,
    kept_by,
    model_of,
    new_past,
    page_ends,
    page_size_of,
    prompt_of,
    run_on,
    serve,
    serve_exactly,
    tokens_of,
    untouched,
)
from tests.support.operations import Stepped
from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.errors import ConfigError, InputError, LayoutError, StateError, TokenError
from unified_cache.core.page import MediaItem, Namespace
from unified_cache.core.pool import Hits, Slots
from unified_cache.core.window import window
from unified_cache.integrations.transformers import (
    KeptState,
    PrefixCachedModel,
    Stage,
    layer_state,
)

LLAMA = "tiny-llama"
WINDOWED = "tiny-gemma3"
PROMPT = prompt_of(LLAMA, 1, is_aligned=False)

FLOAT, BFLOAT = 4, 2
HEADS_BYTES = 2 * 16
"""Values of K, or of V, of one token in one layer of the families that share heads."""
PAGE_BYTES = {
    "tiny-llama": {"kv": 32 * 2 * 2 * HEADS_BYTES * FLOAT},
    "tiny-gemma3": {"kv": 16 * 2 * HEADS_BYTES * FLOAT, "swa": 16 * 2 * 2 * HEADS_BYTES * FLOAT},
    "tiny-gpt-oss": {"kv": 16 * 2 * HEADS_BYTES * BFLOAT, "swa": 16 * 2 * HEADS_BYTES * BFLOAT},
    # Four columns of the convolution, of which the model keeps all; and the state of four heads.
    "tiny-qwen3-next": {"kv": 16 * 2 * HEADS_BYTES * FLOAT, "mamba": (128 * 4 + 4 * 16 * 16) * FLOAT},
    # K and V of the plain window, one of both in the other layers; kv and gate of the group that overlaps.
    "tiny-deepseek-v4": {
        "kv": 0,
        "deepseek_v4_c4": 32 * 512 * FLOAT,
        "deepseek_v4_c4_indexer": 32 * 64 * FLOAT,
        "deepseek_v4_c128": 512 * FLOAT,
        "swa": 128 * 4 * 512 * FLOAT,
        "deepseek_v4_c4_state": 2 * 4 * 512 * FLOAT,
        "deepseek_v4_c4_indexer_state": 2 * 4 * 64 * FLOAT,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_tensors_that_the_model_keeps(family: str) -> None:
    assert {pool.name: pool.page_bytes for pool in kept_by(family).layout.pools} == PAGE_BYTES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_is_kept_one_token_shorter_than_the_config_counts_it(family: str) -> None:
    rows_max = {strand.rows_max for strand in kept_by(family).strands if strand.pool == "swa"}
    expected = {"tiny-gemma3": {39}, "tiny-gpt-oss": {24}, "tiny-deepseek-v4": {127}}
    assert rows_max == expected.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_written_to_their_locations_are_what_is_captured_page_by_page(family: str) -> None:
    page_size = page_size_of(family)
    tokens = tokens_of(3, PAGES * page_size)
    pages = kept_by(family).allocate([2 * PAGES] * len(kept_by(family).layout.components))
    components = pages.layout.components
    past, written, captured = new_past(family), np.arange(1, PAGES + 1), np.arange(PAGES + 1, 2 * PAGES + 1)
    # Two cuts within each page, and one at its end: the compressors are between two rows, the windows overlap.
    cuts = [0, *(page * page_size + cut for page in range(PAGES) for cut in (3, page_size // 2 + 1, page_size))]
    for start, end in pairwise(cuts):
        forward(family, past, tokens[start:end])
        at = torch.arange(start, end)
        locs = torch.from_numpy(written)[at // page_size] * page_size + at % page_size
        pages.write(past, [locs for _ in components])
        if end % page_size == 0:
            page = captured[end // page_size - 1 :][:1].astype(np.int32)
            pages.capture(past, [page for _ in components])

    def restored(slots: Slots) -> list[torch.Tensor]:
        windows = [slots[window(PAGES, component.span) :] for component in components]
        return rows_of(pages.restore(windows, PAGES))

    expected = rows_of(past)
    for slots in (written, captured):
        found = restored(slots.astype(np.int32))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "pool"), [("tiny-qwen3-next", "mamba"), ("tiny-deepseek-v4", "deepseek_v4_c4_state")]
)
def test_state_after_a_boundary_is_not_written_as_that_of_the_boundary(family: str, pool: str) -> None:
    pages = kept_by(family).allocate([2] * len(kept_by(family).layout.components))
    past, tokens = new_past(family), tokens_of(3, page_size_of(family) + 4)
    forward(family, past, tokens)
    pages.write(past, [torch.arange(len(tokens)) + page_size_of(family) for _ in pages.layout.components])
    assert not any(tensor.any() for tensor in pages.tensors(pool))


def rows_of(past: DynamicCache) -> list[torch.Tensor]:
    kept = [each for layer in past.layers for each in layer_state(layer).read()]
    assert all(each.rows is not None for each in kept)
    return [each.rows for each in kept if each.rows is not None]


def test_a_page_that_a_window_has_left_cannot_be_captured() -> None:
    pages = kept_by(WINDOWED).allocate([PAGES, PAGES])
    past = new_past(WINDOWED)
    forward(WINDOWED, past, tokens_of(3, PAGES * page_size_of(WINDOWED)))
    slots = np.arange(1, PAGES + 1, dtype=np.int32)
    with pytest.raises(AssertionError, match="dropped"):
        pages.capture(past, [slots, slots])


@pytest.mark.parametrize("family", ["tiny-gemma3", "tiny-gpt-oss", "tiny-qwen3-next"])
def test_a_large_chunk_ends_where_state_is_kept_that_the_model_would_drop(family: str) -> None:
    shared = 2 * page_size_of(family)
    first, second = prompt_of(family, 1, is_aligned=False), prompt_of(family, 2, is_aligned=False)
    tokens = first[:shared] + second[shared:]
    with engine(family, shape=CacheSizes(retention=EVERYWHERE, chunk_pages=PAGES)) as ours:
        cold = chunk_ends(ours, first)
        assert shared in cold
        rest = chunk_ends(ours, tokens)
        assert rest[0] > shared
    with engine(family, shape=CacheSizes(retention=EVERYWHERE, chunk_pages=PAGES)) as ours:
        serve(ours, first)
        with ours.prefill(tokens) as sequence:
            assert sequence.reused == Hits(device=shared)
            ends = [0, *(end for end in cold if end <= shared), *rest]
            assert is_equal(go_on(sequence), run_on(family, new_past(family), tokens, ends))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_without_room_is_computed_and_not_kept(family: str) -> None:
    tokens = prompt_of(family, 1, is_aligned=False)
    with engine(family, shape=CacheSizes(device_pages=PAGES - 1)) as ours:
        assert serve_exactly(ours, family, tokens) == Hits()
        assert serve_exactly(ours, family, tokens) == Hits()


def test_requests_in_any_order_of_steps_are_exact() -> None:
    prompts = [prompt_of(LLAMA, 1, is_aligned=False), PROMPT, prompt_of(LLAMA, 2, is_aligned=True)]
    with engine(LLAMA) as ours:
        under_way = [ours.start(tokens) for tokens in prompts]
        for _ in range(2 * PAGES):
            for sequence in under_way:
                sequence.step()
        assert {sequence.stage for sequence in under_way} == {Stage.READY}
        for tokens, sequence in zip(prompts, under_way, strict=True):
            assert is_equal(go_on(sequence), run_on(LLAMA, new_past(LLAMA), tokens, page_ends(LLAMA, len(tokens))))
            sequence.finish()
        ours.cache.check()


def test_an_answer_says_what_happened() -> None:
    times = iter([10.0, 12.5])
    with engine(LLAMA) as ours:
        timed = PrefixCachedModel(model_of(LLAMA), ours.cache, ours.pages, clock=lambda: next(times))
        serve(ours, PROMPT)
        generation = timed.generate(PROMPT, tokens_max=5)
        assert generation.answer is None
        tokens = tuple(generation)
        answer = generation.answer
        assert answer is not None
        assert (answer.tokens, len(tokens)) == (tokens, 5)
        assert answer.reused == Hits(device=PAGES * page_size_of(LLAMA))
        assert answer.prompt_tokens == answer.reused.total + answer.computed_tokens == len(PROMPT)
        assert answer.first_token_s == 2.5


def test_a_request_counts_once_whatever_is_looked_for_on_its_way() -> None:
    with engine(LLAMA) as ours:
        for reused in (0, PAGES):
            before = ours.cache.stats().lookups
            serve(ours, PROMPT)
            after = ours.cache.stats().lookups
            assert after.count == before.count + 1
            assert after.hits.device == before.hits.device + reused
            assert after.missed_pages == before.missed_pages + PAGES - reused


def test_a_stop_token_is_the_last_one() -> None:
    with engine(LLAMA) as ours:
        tokens = list(ours.generate(PROMPT, tokens_max=9))
        assert list(ours.generate(PROMPT, tokens_max=9, stop={tokens[3]})) == tokens[: tokens.index(tokens[3]) + 1]


def test_leaving_an_answer_early_gives_everything_back() -> None:
    with engine(LLAMA) as ours:
        generation = ours.generate(PROMPT, tokens_max=90)
        for _, _ in zip(range(40), generation, strict=False):
            pass
        generation.close()
        assert_at_rest(ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_aborted_after_whichever_step_gives_everything_back(family: str) -> None:
    """Some of its prompt is in storage, and another request runs on beside it."""
    stored, page_size = prompt_of(family, 1, is_aligned=False), page_size_of(family)
    tokens, other = (*stored[: 2 * page_size], *stored[:page_size]), prompt_of(family, 2, is_aligned=False)
    aborted_at: set[Stage | None] = set()
    shape = CacheSizes(device_pages=2 * TIGHT, host_pages=2 * TIGHT, retention=EVERYWHERE)
    dice = random.Random(family)
    workers = Stepped(dice=dice)
    with engine(family, L3("memory:", is_shared=False), shape, workers) as ours:
        serve(ours, stored)
        for steps in count():
            ours.cache.reset()
            sequence, beside = ours.start(tokens), ours.start(other)
            workers.dice = None
            for step in range(steps):
                if step % 4 == 3 and workers.waiting:
                    workers.run()
                for each in (sequence, beside):
                    if each.stage is not Stage.READY:
                        each.step()
            aborted_at.add(sequence.stage)
            sequence.abort()
            ours.cache.check()
            workers.dice = dice
            beside.abort()
            assert_at_rest(ours)
            if Stage.READY in aborted_at:
                break
        assert serve_exactly(ours, family, stored, 1).storage
    assert aborted_at == {None, *Stage}


def test_a_forward_that_fails_gives_everything_back() -> None:
    with engine(LLAMA) as ours:
        with pytest.raises(IndexError):
            ours.prefill((*PROMPT[:-1], 1 << 20))
        assert_at_rest(ours)


def test_a_request_goes_on_only_between_its_prompt_and_its_end() -> None:
    with engine(LLAMA) as ours:
        sequence = ours.start(PROMPT)
        with pytest.raises(StateError, match="ready"):
            sequence.feed(1)
        while sequence.step() is not Stage.READY:
            pass
        sequence.feed(1)
        sequence.finish()
        sequence.finish()
        sequence.abort()
        for act in (sequence.step, lambda: sequence.feed(1)):
            with pytest.raises(StateError, match="over"):
                act()


def test_what_is_no_prompt_is_refused() -> None:
    with engine(LLAMA) as ours:
        with pytest.raises(InputError, match="at least one token"):
            ours.prefill([])
        with pytest.raises(TokenError):
            ours.prefill([-1])
        with pytest.raises(InputError, match="tokens_max"):
            ours.generate(PROMPT, tokens_max=0)


def test_a_model_that_no_pages_can_be_kept_of_is_refused() -> None:
    encoded = T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    )
    with pytest.raises(LayoutError, match="a decoder alone, found T5ForConditionalGeneration, which has an encoder"):
        KeptState.of(encoded)
    forgetful = OpenAIGPTLMHeadModel(OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    with pytest.raises(LayoutError, match="must take a cache object, found OpenAIGPTLMHeadModel"):
        KeptState.of(forgetful, 16)
    with pytest.raises(LayoutError, match="a model of transformers, found 'gpt2'"):
        KeptState.of("gpt2")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="StaticLayer"):
        layer_state(StaticLayer(max_cache_len=8))
    with pytest.raises(ConfigError, match="a tiny model must be one of"):
        model_of("gpt-5")


def test_a_cache_object_is_passed_as_whatever_argument_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaForCausalLM.forward

    def forward(
        self: LlamaForCausalLM,
        input_ids: torch.Tensor,
        use_cache: bool | None = None,
        prefix_state: Cache | None = None,
    ) -> object:
        return plain(self, input_ids, None, None, prefix_state, use_cache=use_cache)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert KeptState.of(model_of(LLAMA), page_size_of(LLAMA)).layout == kept_by(LLAMA).layout


def test_a_model_that_does_not_go_on_from_its_cache_object_is_refused() -> None:
    config = FalconMambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=32, initializer_range=0.5)
    torch.manual_seed(1)
    with pytest.raises(LayoutError, match="must go on from its cache object by 2 tokens"):
        KeptState.of(FalconMambaForCausalLM(config), 16)


def test_a_page_is_no_more_than_a_model_has_positions_for() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=32))
    model.eval()  # type: ignore[no-untyped-call]
    with pytest.raises(LayoutError, match="at most 30, as the model has 32 positions, found 64"):
        KeptState.of(model)
    assert KeptState.of(model, 16).layout.page_bytes == 16 * 2 * 16 * 4


def test_pages_of_each_component_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="an entry for each of full, swa, found"):
        kept_by(WINDOWED).allocate([PAGES])


def test_a_page_size_that_the_model_cannot_be_kept_in_is_refused() -> None:
    with pytest.raises(LayoutError, match="128"):
        KeptState.of(model_of("tiny-deepseek-v4"), 64)


def test_a_cache_of_another_layout_and_pages_of_another_model_are_refused() -> None:
    with engine(LLAMA) as ours:
        other_size = KeptState.of(model_of(LLAMA), 64).allocate([PAGES])
        with pytest.raises(ConfigError, match="page_size=32"):
            PrefixCachedModel(model_of(LLAMA), ours.cache, other_size)
        with pytest.raises(ConfigError, match="another model"):
            PrefixCachedModel(model_of(WINDOWED), ours.cache, ours.pages)
        with pytest.raises(ConfigError, match="chunk_tokens"):
            PrefixCachedModel(model_of(LLAMA), ours.cache, ours.pages, chunk_tokens=31)


@pytest.mark.parametrize("family", [LLAMA, WINDOWED, "tiny-qwen3-next"])
@pytest.mark.parametrize("extra_count", [-1, 0, 1, 2])
def test_pages_of_bigrams_are_kept_as_far_as_the_token_after_them_is_known(family: str, extra_count: int) -> None:
    bigrams, page_size = Namespace(bigrams=True), page_size_of(family)
    tokens = tokens_of(1, 2 * page_size + extra_count)
    with engine(family) as ours:
        for turn in range(2):
            sequence = ours.prefill(tokens, bigrams)
            assert is_equal(go_on(sequence, page_size + 2), untouched(family, tokens, page_size + 2))
            assert sequence.reused.total == (turn and (len(tokens) - 1) // page_size * page_size)
            sequence.finish()
            assert_at_rest(ours)
        assert ours.cache.match(ours.cache.prompt(tokens)).tree_end == 0


# ---- pictures ------------------------------------------------------------------------------------------------

PICTURE_TOKENS, PLACEHOLDER, SEEING_PAGE = 16, 255, 8
SEEING_PROMPT = [*range(1, 13), *[PLACEHOLDER] * PICTURE_TOKENS, *range(20, 35)]


@cache
def seeing_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, object] = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
    vision = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 4, **sizes}
    text = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, **sizes}
    fields: dict[str, object] = {"image_token_index": PLACEHOLDER, "vision_feature_layer": -1}
    config = AutoConfig.for_model(
        "llava",
        vision_config={"model_type": "clip_vision_model", **vision},
        text_config={"model_type": "llama", **text},
        **fields,
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    model.train(mode=False)
    return model


class RandomPicture:
    """A picture of random pixels, and how often it was embedded."""

    def __init__(self, seed: int) -> None:
        self.pixels = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(seed))
        self.item = MediaItem(12, PICTURE_TOKENS, hashlib.sha256(self.pixels.numpy().tobytes()).hexdigest())
        self.embedded_count = 0

    @torch.no_grad()
    def embed(self) -> torch.Tensor:
        self.embedded_count += 1
        model = cast("LlavaForConditionalGeneration", seeing_model())
        rows: torch.Tensor = model.get_image_features(pixel_values=self.pixels).pooler_output[0]
        return rows

    def untouched(self) -> torch.Tensor:
        """Return the logits after the prompt without a cache, computed in the same chunks."""
        kept, rows = KeptState.of(seeing_model(), SEEING_PAGE), self.embed()
        past = kept.new_cache()
        for start in range(0, len(SEEING_PROMPT), SEEING_PAGE):
            tokens = SEEING_PROMPT[start : start + SEEING_PAGE]
            first, last = max(12, start), min(12 + PICTURE_TOKENS, start + len(tokens))
            media = {first - start: rows[first - 12 : last - 12]} if first < last else {}
            logits = kept.run(past, tokens, media)
        self.embedded_count = 0
        return logits


def test_two_pictures_behind_equal_placeholders_have_each_its_own_logits_and_share_the_text_before(
    tmp_path: Path,
) -> None:
    model, pictures = seeing_model(), (RandomPicture(1), RandomPicture(2))
    expected = [picture.untouched() for picture in pictures]
    by_itself = [model(torch.tensor([SEEING_PROMPT]), picture.pixels).logits[0, -1] for picture in pictures]
    assert not torch.allclose(expected[0], expected[1], atol=0.1), "the pictures do not matter"
    for ours, theirs in zip(expected, by_itself, strict=True):
        torch.testing.assert_close(ours, theirs)
    kept = KeptState.of(model, SEEING_PAGE)
    config = CacheConfig(device_pages=(32,), host_pages=(32,), write=WritePolicy.THROUGH)
    for reused in ([0, 8, 40, 40], [40, 40]):  # the second engine finds in storage what the first one has left
        pages = kept.allocate(config.device_pages)
        store = f"file:{tmp_path}/store"
        with UnifiedCache.open(kept.layout, config, pages.pools, identity="seeing", storage=store) as opened:
            engine = PrefixCachedModel(model, opened, pages, chunk_tokens=SEEING_PAGE)
            for number, tokens in enumerate(reused):
                picture = pictures[number % 2]
                picture.embedded_count = 0
                with engine.prefill(SEEING_PROMPT, media={picture.item: picture.embed}) as sequence:
                    assert sequence.reused.total == tokens
                    assert sequence.logits is not None
                    assert torch.equal(sequence.logits, expected[number % 2])
                assert picture.embedded_count == (tokens < 12 + PICTURE_TOKENS), "once, and only if it is computed"
            opened.wait_all(10)


def test_media_that_are_embedded_in_another_number_of_rows_are_refused() -> None:
    pages = KeptState.of(seeing_model(), SEEING_PAGE).allocate((32,))
    with UnifiedCache.open(pages.layout, CacheConfig((32,), (0,)), pages.pools, identity="seeing") as opened:
        engine = PrefixCachedModel(seeing_model(), opened, pages)
        with pytest.raises(InputError):
            engine.prefill(SEEING_PROMPT, media={MediaItem(12, PICTURE_TOKENS, "cat"): lambda: torch.zeros(3, 32)})
        with pytest.raises(InputError):
            engine.prefill(SEEING_PROMPT, media={MediaItem(40, PICTURE_TOKENS, "cat"): lambda: torch.zeros(16, 32)})
        opened.check()
