"""Pages of a request that its windows still need. R7 and R14 are rules that SGLang 0.5.23 keeps, in pages."""

import numpy as np
import pytest

from unified_cache.core.window import SPAN_ALL, needed_pages, restorable_ends, window

OUT_OF_THE_WINDOW = (
    # length, window, page size, tokens that left the window: [0, end)
    (1000, 128, 256, 512),
    (1023, 128, 256, 512),
    (1024, 128, 256, 768),
    (511, 128, 256, 0),
    (512, 128, 256, 256),
    (1000, 127, 1, 873),
    (1000, 127, 64, 832),
    (3000, 1023, 64, 1920),
)
"""What SGLang 0.5.23 frees of a running request whose prefix may be shared, in tokens."""


@pytest.mark.parametrize(("length", "window_tokens", "page_size", "gone_tokens"), OUT_OF_THE_WINDOW)
def test_pages_are_needed_no_more_when_the_window_of_the_full_pages_has_passed_them_r7(
    length: int, window_tokens: int, page_size: int, gone_tokens: int
) -> None:
    end, span = length // page_size, -(-window_tokens // page_size)
    needed = needed_pages([end], span, 0, end)
    assert not needed[: gone_tokens // page_size].any()
    assert needed[gone_tokens // page_size :].all()
    assert window(end, span) * page_size == gone_tokens


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("window_tokens", [1, 15, 16, 17, 127, 128, 255, 256, 257])
def test_every_page_that_a_resume_looks_back_on_is_needed_and_none_before(page_size: int, window_tokens: int) -> None:
    for end in range(1100 // page_size):
        first = window(end, -(-window_tokens // page_size))
        oldest_token = max(0, end * page_size - window_tokens)
        assert first * page_size <= oldest_token
        assert (first + 1) * page_size > oldest_token


def test_one_window_of_a_65536_token_chunk_is_needed_and_not_512_times_as_much_r14() -> None:
    pages_count = 65_536 // 128
    assert pages_count == 512
    assert int(needed_pages([pages_count], 1, 0, pages_count).sum()) == 1


def test_pages_of_a_range_are_needed_for_ends_inside_and_after_it() -> None:
    assert needed_pages([4, 7, 30], 2, 3, 7).tolist() == [True, False, True, True]
    assert needed_pages([8], 2, 3, 7).tolist() == [False, False, False, True]
    assert needed_pages([], 2, 3, 7).tolist() == [False] * 4
    assert needed_pages([7], SPAN_ALL, 3, 7).all()


def test_an_end_is_restorable_where_every_window_before_it_is_whole() -> None:
    lacks = np.array([False, True, False, False, False])
    assert restorable_ends([SPAN_ALL, 2], [None, lacks], 10, 5, [0, 0]).tolist() == [True, False, False, True, True]
    assert restorable_ends([SPAN_ALL, 2], [None, lacks], 10, 5, [0, 10]).tolist() == [False, False, False, True, True]
    assert restorable_ends([SPAN_ALL, 2], [lacks, None], 10, 5, [0, 0]).tolist() == [True] + [False] * 4
