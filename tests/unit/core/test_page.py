"""Tokens, pages and keys at the boundary."""

import hashlib
import struct
from array import array
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.core.errors import ConfigError, InputError, TokenError
from unified_cache.core.page import MediaItem, Namespace, Prompt, encode_tokens

TOKENS = [5, 0, 2**31 - 1, 7, 8, 9]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        array("i", TOKENS),
        array("q", TOKENS),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, ">i4"),
        np.array([TOKENS, TOKENS], np.int64).T.ravel()[::2],
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
    ],
    ids=str,
)
def test_every_kind_of_token_sequence_is_the_same_prompt(tokens: list[int]) -> None:
    assert encode_tokens(tokens) == struct.pack("<6i", *TOKENS)


@pytest.mark.parametrize("bad", [-1, 2**31, 2**32 + 5, 2**63])
def test_a_token_id_out_of_range_is_an_error_and_never_wraps(bad: int) -> None:
    with pytest.raises(TokenError, match=r"\[0, 2\*\*31\)"):
        encode_tokens([1, bad, 3])


@pytest.mark.parametrize(
    "bad",
    [
        [1.0, 2.0],
        [[1, 2], [3, 4]],
        ["a"],
        [None],
        b"abcd",
        [True, False],
        np.ones(1, np.float32),
        torch.tensor([0.5]),
        5,
    ],
    ids=str,
)
def test_what_is_not_a_flat_run_of_integers_is_an_error(bad: object) -> None:
    with pytest.raises(TokenError):
        encode_tokens(bad)  # type: ignore[arg-type]


def test_the_callers_array_may_be_reused() -> None:
    tokens = np.arange(32, dtype=np.int32)
    prompt = Prompt.of(tokens, 16)
    tokens[:] = 7
    assert prompt.tokens == np.arange(32, dtype="<i4").tobytes()


def test_a_page_size_that_is_not_positive_is_an_error() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        Prompt.of([1, 2], 0)


def test_a_key_is_the_digest_of_the_page_and_of_everything_before_it() -> None:
    prompt = Prompt.of(range(4), 2)
    first = hashlib.sha256(struct.pack("<2I", 0, 1)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 2, 3)).digest()
    assert prompt.keys == (first, second)


def test_salt_and_extra_key_seed_the_chain_as_sglang_does() -> None:
    part = b"\x01" + struct.pack("<Q", 3) + b"abc"
    seed = hashlib.sha256(b"sglang-cache-namespace-v1" + part + b"\x00").digest()
    expected = hashlib.sha256(seed + struct.pack("<2I", 1, 2)).digest()
    assert Prompt.of([1, 2], 2, Namespace(extra_key="abc")).keys == (expected,)


FIELDS = st.one_of(st.none(), st.text(max_size=3))


@given(
    st.tuples(FIELDS, FIELDS, FIELDS, FIELDS),
    st.tuples(FIELDS, FIELDS, FIELDS, FIELDS),
)
def test_two_namespaces_have_one_seed_only_if_they_are_one(
    a: tuple[str | None, ...], b: tuple[str | None, ...]
) -> None:
    assert (Namespace(*a).seed == Namespace(*b).seed) == (a == b)


LONG = [(i * i * 7919) % 151936 for i in range(200)]
SGLANG_BIGRAMS = [
    # tokens, page size, extra key, cache salt, pages, and the key of the last, in which are all before it
    ([0, 1, 2, 3, 4], 1, None, None, 4, "17eb0387c81a9b6b8b6f24c92a96ea0d0ca52d58fd81aa77f74267076ff9b46a"),
    (
        [7, 0, 2**31 - 1, 5, 5, 5, 9, 11, 3, 128000, 1],
        *(4, None, None, 2),
        "1b4058e9e14ec8d9ae49f26b22fafa549181f138dd738efeba98d9ffad813b34",
    ),
    ([1, 2, 3, 4, 5], 2, "abc", None, 2, "d68a8e0652fe4a916ff66ef2d2ca2d582206fcc5c005694df822543e9af03653"),
    ([1, 2, 3, 4, 5], 2, "abc", "salt", 2, "c6a2d461ac9cde9a2a004c249b2b52b16dea8fe83793c55e0e52f4a4d9c65c49"),
    (LONG, 64, None, "tenant-7", 3, "ecd5152f3216a171b7be43a4c47310be8cf5145f3a71512f0d7142ca8f91388c"),
]
"""From SGLang 0.5.23: get_storage_hash_str of a RadixKey in its bigram view, cut to whole pages."""


@pytest.mark.parametrize(("tokens", "page_size", "extra_key", "cache_salt", "pages_count", "last_key"), SGLANG_BIGRAMS)
def test_pages_of_bigrams_are_named_as_sglang_names_them(
    tokens: list[int], page_size: int, extra_key: str | None, cache_salt: str | None, pages_count: int, last_key: str
) -> None:
    prompt = Prompt.of(tokens, page_size, Namespace(extra_key, cache_salt, bigrams=True))
    assert (len(prompt.keys), prompt.keys[-1].hex()) == (pages_count, last_key)
    assert prompt.pages_count == pages_count
    assert prompt.head(1).keys == prompt.keys[:1]


BIGRAMS = Namespace(bigrams=True)
FEW = st.lists(st.integers(0, 2), max_size=9)


@given(FEW, FEW, st.sampled_from([1, 2, 3]))
def test_two_prompts_share_the_pages_whose_pairs_are_the_same(a: list[int], b: list[int], page_size: int) -> None:
    pairs = [list(pairwise(tokens)) for tokens in (a, b)]
    agreeing = [one == other for one, other in zip(*pairs, strict=False)]
    common = (agreeing.index(False) if False in agreeing else len(agreeing)) // page_size
    left, right = Prompt.of(a, page_size, BIGRAMS), Prompt.of(b, page_size, BIGRAMS)
    same = [one == other for one, other in zip(left.keys, right.keys, strict=False)]
    assert same == [number < common for number in range(len(same))]
    # A tree tells them apart by root and tokens, where a store has keys.
    if common:
        assert (left.root, left.head(common).tokens) == (right.root, right.head(common).tokens)
    if common < min(left.pages_count, right.pages_count):
        assert (left.root, left.head(common + 1).tokens) != (right.root, right.head(common + 1).tokens)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("bigrams", [False, True])
@pytest.mark.parametrize(
    "other", [(), (MediaItem(21, 8, "dog"),), (MediaItem(21, 9, "cat"),), (MediaItem(22, 8, "cat"),)]
)
def test_prompts_share_the_keys_before_the_first_medium_that_differs_and_none_after_it(
    page_size: int, bigrams: bool, other: tuple[MediaItem, ...]
) -> None:
    namespace, cat = Namespace(bigrams=bigrams), MediaItem(21, 8, "cat")
    same = [Prompt.of([7] * 64, page_size, namespace, media=media) for media in ([cat], (cat,))]
    differing = Prompt.of([7] * 64, page_size, namespace, media=other)
    shared = (21 - bigrams) // page_size
    assert same[0].keys == same[1].keys
    assert differing.keys[:shared] == same[0].keys[:shared]
    assert set(differing.keys[shared:]).isdisjoint(same[0].keys[shared:])
    assert same[0].head(shared + 1).keys == same[0].keys[: shared + 1]


def test_no_tokens_name_a_page_as_media_do() -> None:
    marked = Prompt.of([7, 7], 2, media=[MediaItem(0, 1, "cat")])
    name = marked.tokens + struct.pack("<iqqq", -1, 0, 1, 3) + b"cat"
    assert marked.keys == (hashlib.sha256(name).digest(),)


@pytest.mark.parametrize(
    "media",
    [
        [MediaItem(-1, 2, "cat")],
        [MediaItem(0, 0, "cat")],
        [MediaItem(62, 3, "cat")],
        [MediaItem(4, 4, "cat"), MediaItem(0, 5, "dog")],
        [(0, 4, "cat")],
        "cat",
        np.array([]),
    ],
    ids=str,
)
def test_media_outside_the_tokens_or_over_each_other_are_an_error(media: list[MediaItem]) -> None:
    with pytest.raises(InputError):
        Prompt.of([7] * 64, 16, media=media)
    for start, digest in ((0, ""), (0, b"cat"), (0, "\ud800"), (0, None), (0, 5), (0.5, "cat")):
        with pytest.raises(InputError):
            MediaItem(start, 4, digest)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64])
@pytest.mark.parametrize("bigrams", [False, True])
def test_media_placed_by_numbers_of_numpy_are_those_of_int_and_never_wrap(
    kind: Callable[[int], int], bigrams: bool
) -> None:
    def placed(number: Callable[[int], int], start: int, length: int, tokens_count: int) -> Prompt:
        item = MediaItem(number(start), number(length), "cat")
        return Prompt.of([7] * tokens_count, 16, Namespace(bigrams=bigrams), media=[item])

    for start in (0, 16, 60):
        assert placed(kind, start, 4, 64).keys == placed(int, start, 4, 64).keys
    with pytest.raises(InputError):
        placed(kind, 100, 100, 120)


def test_a_head_has_the_same_keys_whether_they_were_computed_before_or_not() -> None:
    fresh, asked = Prompt.of(range(64), 16), Prompt.of(range(64), 16)
    assert asked.keys[:2] == asked.head(2).keys == fresh.head(2).keys
    assert asked.head(9) is asked
    assert asked.head(0).pages_count == 0
