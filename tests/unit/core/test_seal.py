"""Sealed pages: every damage is found, whatever the number of buffers."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.budget import PHASES, examples
from unified_cache.core.seal import HEADER_BYTES, Flaw, Label, PageChecksum, seal_buffers, verify_buffers

LABEL = Label(bytes(range(32)), bytes(range(32, 64)), "kv")
CUTTINGS = ((), (HEADER_BYTES,), (HEADER_BYTES, 300, 700), (1, 5, 130), (40, 40, 80, 127, 129, 1000))


def sealed(payload_bytes: int = 1000) -> bytearray:
    page = bytearray(HEADER_BYTES) + random.Random(1).randbytes(payload_bytes)
    seal_buffers((memoryview(page),), LABEL)
    return page


def cut(page: bytearray, cuts: Sequence[int]) -> list[memoryview]:
    edges = [0, *cuts, len(page)]
    return [memoryview(page)[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("cuts", CUTTINGS)
def test_every_flipped_bit_of_the_header_and_many_of_the_payload_are_found(cuts: Sequence[int]) -> None:
    page = sealed()
    buffers = cut(page, cuts)
    header = range(HEADER_BYTES * 8)
    for bit in (*header, *random.Random(2).sample(range(HEADER_BYTES * 8, len(page) * 8), 500)):
        page[bit // 8] ^= 1 << bit % 8
        assert verify_buffers(buffers, LABEL) is (Flaw.HEADER if bit in header else Flaw.PAYLOAD)
        page[bit // 8] ^= 1 << bit % 8
    assert verify_buffers(buffers, LABEL) is None


def test_every_truncation_and_bytes_beyond_the_page_are_found() -> None:
    page = memoryview(sealed(50))
    for page_bytes in range(len(page)):
        assert verify_buffers((page[:page_bytes],), LABEL) is Flaw.LENGTH
        half = page_bytes // 2
        assert verify_buffers([page[:half], page[half:page_bytes]], LABEL) is Flaw.LENGTH
    assert verify_buffers((memoryview(sealed() + b"\x00"),), LABEL) is Flaw.LENGTH


@pytest.mark.parametrize(
    "other",
    [LABEL._replace(identity=bytes(32)), LABEL._replace(key=bytes(32)), LABEL._replace(pool="kv_index")],
)
def test_a_page_of_another_identity_key_or_pool_is_foreign(other: Label) -> None:
    assert verify_buffers((memoryview(sealed()),), other) is Flaw.FOREIGN


def test_zeros_are_not_a_page() -> None:
    assert verify_buffers((memoryview(bytearray(1000)),), LABEL) is Flaw.HEADER


@settings(max_examples=examples(200, 5_000), deadline=None, phases=PHASES)
@given(
    payload_bytes=st.integers(0, 1200),
    cuts=st.lists(st.integers(0, 1328), max_size=9).map(sorted),
    flipped=st.none() | st.integers(0, 1327),
)
def test_any_cuts_are_sealed_and_verified_as_the_joined_page(
    payload_bytes: int, cuts: list[int], flipped: int | None
) -> None:
    joined = sealed(payload_bytes)
    page = bytearray(HEADER_BYTES) + joined[HEADER_BYTES:]
    buffers = cut(page, [min(each, len(page)) for each in cuts])
    seal_buffers(buffers, LABEL)
    assert page == joined
    if flipped is not None and flipped < len(page):
        page[flipped] ^= 4
        assert verify_buffers(buffers, LABEL) is verify_buffers((memoryview(page),), LABEL) is not None
    else:
        assert verify_buffers(buffers, LABEL) is None
    summed = PageChecksum()
    start = 0
    for buffer in buffers:
        summed.add(start, [buffer])
        start += len(buffer)
    whole = PageChecksum()
    whole.add(0, buffers)
    assert summed.of(len(page)) == whole.of(len(page)) is not None
    assert verify_buffers(buffers, LABEL, summed) is verify_buffers(buffers, LABEL)


def summed_by(steps: Sequence[tuple[int, int]], page: bytearray) -> PageChecksum:
    checksum = PageChecksum()
    for start, end in steps:
        checksum.add(start, [memoryview(page)[start:end]])
    return checksum


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [(0, 1127)],
        [(0, 500), (501, 1128)],
        [(0, 600), (500, 1128)],
        [(500, 1128), (0, 500)],
        [(500, 1128)],
        [(0, 500), (0, 500)],
        [(0, 1128), (1000, 1128)],
        [(0, 500), (501, 1000), (500, 1128)],
        [(0, 500), (600, 1128), (1028, 1128)],
    ],
)
def test_a_checksum_with_a_gap_or_an_overlap_is_none(steps: list[tuple[int, int]]) -> None:
    page = sealed()
    checksum = summed_by(steps, page)
    assert checksum.of(len(page)) is None
    assert verify_buffers([memoryview(page)], LABEL, checksum) is None
    page[1000] ^= 1
    assert verify_buffers([memoryview(page)], LABEL, checksum) is Flaw.PAYLOAD


def test_a_checksum_that_begins_again_forgets_what_came_before() -> None:
    page = sealed()
    damaged = bytearray(page)
    damaged[700] ^= 1
    checksum = summed_by([(0, 500), (500, 900)], damaged)
    for start, end in ((0, 800), (800, 1128)):
        checksum.add(start, [memoryview(page)[start:end]])
    assert checksum.of(len(page)) == summed_by([(0, 1128)], page).of(len(page)) is not None
    for start, end in ((0, 800), (800, 1128)):
        checksum.add(start, [memoryview(damaged)[start:end]])
    assert verify_buffers([memoryview(damaged)], LABEL, checksum) is Flaw.PAYLOAD


def test_a_wrong_checksum_makes_no_sound_page_flawed() -> None:
    page = sealed()
    other = bytearray(page)
    other[700] ^= 1
    assert verify_buffers([memoryview(page)], LABEL, summed_by([(0, 1128)], other)) is None


def test_a_header_that_is_damaged_after_it_was_read_is_found_whatever_the_checksum() -> None:
    page = sealed()
    checksum = summed_by([(0, 1128)], page)
    page[HEADER_BYTES - 1] ^= 1
    assert verify_buffers([memoryview(page)], LABEL, checksum) is Flaw.HEADER
