"""Sealed pages: every damage is found, whatever the number of buffers."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from unified_cache.seal import HEADER_BYTES, Flaw, Label, seal, seal_buffers, verify, verify_buffers

LABEL = Label(bytes(range(32)), bytes(range(32, 64)), "kv")
CUTTINGS = ((), (HEADER_BYTES,), (1, 5, 130), (40, 40, 80, 127, 129, 1000))


def sealed(payload_bytes: int = 1000) -> bytearray:
    page = bytearray(HEADER_BYTES) + random.Random(1).randbytes(payload_bytes)
    seal(memoryview(page), LABEL)
    return page


def cut(page: bytearray, cuts: Sequence[int]) -> list[memoryview]:
    edges = [0, *cuts, len(page)]
    return [memoryview(page)[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("payload_bytes", [0, 1, 7, 1000, 100_000])
def test_a_sealed_page_verifies(payload_bytes: int) -> None:
    assert verify(memoryview(sealed(payload_bytes)), LABEL) is None


@pytest.mark.parametrize("cuts", CUTTINGS)
def test_a_page_in_several_buffers_is_sealed_as_if_it_were_joined(cuts: Sequence[int]) -> None:
    joined = sealed()
    page = bytearray(HEADER_BYTES) + joined[HEADER_BYTES:]
    seal_buffers(cut(page, cuts), LABEL)
    assert page == joined
    assert verify_buffers(cut(page, cuts), LABEL) is None


@pytest.mark.parametrize("cuts", CUTTINGS)
def test_every_flipped_bit_of_the_header_is_found(cuts: Sequence[int]) -> None:
    page = sealed()
    buffers = cut(page, cuts)
    for bit in range(HEADER_BYTES * 8):
        page[bit // 8] ^= 1 << bit % 8
        assert verify_buffers(buffers, LABEL) is Flaw.HEADER
        page[bit // 8] ^= 1 << bit % 8
    assert verify_buffers(buffers, LABEL) is None


@pytest.mark.parametrize("cuts", CUTTINGS)
def test_a_flipped_bit_of_the_payload_is_found(cuts: Sequence[int]) -> None:
    page = sealed()
    buffers = cut(page, cuts)
    for bit in random.Random(2).sample(range(HEADER_BYTES * 8, len(page) * 8), 500):
        page[bit // 8] ^= 1 << bit % 8
        assert verify_buffers(buffers, LABEL) is Flaw.PAYLOAD
        page[bit // 8] ^= 1 << bit % 8
    assert verify_buffers(buffers, LABEL) is None


def test_every_truncation_is_found() -> None:
    page = memoryview(sealed(50))
    for page_bytes in range(len(page)):
        assert verify(page[:page_bytes], LABEL) is Flaw.LENGTH
        half = page_bytes // 2
        assert verify_buffers([page[:half], page[half:page_bytes]], LABEL) is Flaw.LENGTH


def test_bytes_beyond_the_page_are_found() -> None:
    assert verify(memoryview(sealed() + b"\x00"), LABEL) is Flaw.LENGTH


@pytest.mark.parametrize(
    "other",
    [LABEL._replace(identity=bytes(32)), LABEL._replace(key=bytes(32)), LABEL._replace(pool="kv_index")],
)
def test_a_page_of_another_identity_key_or_pool_is_foreign(other: Label) -> None:
    assert verify(memoryview(sealed()), other) is Flaw.FOREIGN


def test_zeros_are_not_a_page() -> None:
    assert verify(memoryview(bytearray(1000)), LABEL) is Flaw.HEADER
