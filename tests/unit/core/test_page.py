"""Tokens, pages and keys at the boundary."""

import hashlib
import struct
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.errors import CacheError, ConfigError, TokenError
from unified_cache.page import Namespace, Prompt, encode_tokens

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
    assert encode_tokens(tokens, 2) == struct.pack("<6i", *TOKENS)


@pytest.mark.parametrize("bad", [-1, 2**31, 2**32 + 5, 2**63])
def test_a_token_id_out_of_range_is_an_error_and_never_wraps(bad: int) -> None:
    with pytest.raises(TokenError, match=r"\[0, 2\*\*31\)"):
        encode_tokens([1, bad, 3], 1)


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
        encode_tokens(bad, 1)  # type: ignore[arg-type]


def test_no_tokens_are_no_pages() -> None:
    assert Prompt.of([], 16).pages_count == 0
    assert Prompt.of([], 16).keys == ()


def test_a_partial_tail_page_is_cut_off() -> None:
    assert Prompt.of(range(35), 16).pages_count == 2


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


def test_a_head_has_the_same_keys_whether_they_were_computed_before_or_not() -> None:
    fresh, asked = Prompt.of(range(64), 16), Prompt.of(range(64), 16)
    assert asked.keys[:2] == asked.head(2).keys == fresh.head(2).keys
    assert asked.head(9) is asked
    assert asked.head(0).pages_count == 0


def test_every_error_is_a_cache_error() -> None:
    assert issubclass(TokenError, CacheError)
