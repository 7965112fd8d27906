"""Which pages of a running request have left its window. R1 to R23 are rules that SGLang 0.5.23 keeps, in pages."""

import pytest

from unified_cache.errors import ConfigError
from unified_cache.window import dead_end, is_release_due, unshared_dead_end, window

DEAD_ENDS = (
    # length, window, page size, freed tokens [0, end)
    (1000, 128, 256, 512),
    (1023, 128, 256, 512),
    (1024, 128, 256, 768),
    (511, 128, 256, 0),
    (512, 128, 256, 256),
    (1000, 127, 1, 873),
    (1000, 127, 64, 832),
    (3000, 1023, 64, 1920),
)
"""What SGLang 0.5.23 frees of a request whose prefix may be shared, in tokens."""


@pytest.mark.parametrize(("length", "window_tokens", "page_size", "freed_tokens"), DEAD_ENDS)
def test_pages_go_when_the_window_of_the_full_pages_has_passed_them_r7(
    length: int, window_tokens: int, page_size: int, freed_tokens: int
) -> None:
    end = dead_end(length, window_tokens, page_size)
    assert end * page_size == freed_tokens
    assert end == window(length // page_size, -(-window_tokens // page_size))


def test_with_two_protected_pages_of_1000_tokens_nothing_goes_r7() -> None:
    assert dead_end(1000, 128, 256, protected_end=2) == 2
    assert dead_end(1000, 128, 256, protected_end=3) == 3


def test_what_went_stays_gone_when_the_length_is_taken_back_r7() -> None:
    assert dead_end(1024, 128, 256) == 3
    assert dead_end(1000, 128, 256, evicted_end=3) == 3


def test_without_sharing_1000_tokens_free_three_pages_of_256_and_not_two_r7() -> None:
    assert unshared_dead_end(1000, 128, 256) == 768 // 256
    assert dead_end(1000, 128, 256) == 512 // 256
    assert unshared_dead_end(100, 128, 256) == 0
    assert unshared_dead_end(1000, 128, 256, protected_end=4) == 4


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("window_tokens", [1, 15, 16, 17, 127, 128, 255, 256, 257])
def test_no_page_goes_that_the_next_token_or_a_resume_looks_back_on(page_size: int, window_tokens: int) -> None:
    for length in range(1, 1100, 7):
        shared = dead_end(length, window_tokens, page_size)
        alone = unshared_dead_end(length, window_tokens, page_size)
        resume_tokens = length // page_size * page_size
        assert 0 <= shared <= alone
        assert alone * page_size <= max(0, length - window_tokens)
        assert shared * page_size <= max(0, resume_tokens - window_tokens)
        # And every page before them goes: one more would cut into the window.
        assert (alone + 1) * page_size > length - window_tokens
        assert (shared + 1) * page_size > resume_tokens - window_tokens


def test_with_an_interval_of_128_a_release_is_due_at_256_tokens_and_not_at_255_r7() -> None:
    assert not is_release_due(255, 128, 1, evicted_end=0, interval_tokens=128)
    assert is_release_due(256, 128, 1, evicted_end=0, interval_tokens=128)
    assert not is_release_due(767, 128, 256, evicted_end=2, interval_tokens=128)
    assert is_release_due(768, 128, 256, evicted_end=2, interval_tokens=128)


def test_one_window_of_a_65536_token_chunk_is_needed_and_not_512_times_as_much_r14() -> None:
    pages_count = 65_536 // 128
    assert pages_count - window(pages_count, 1) == 1
    assert pages_count == 512


def test_after_a_load_the_floor_stands_where_the_loaded_window_starts_r17() -> None:
    # 12 tokens in pages of 4, a window of 4: the load brings the SWA of page 2 alone.
    assert dead_end(12, 4, 4) == 2
    assert dead_end(12, 4, 4, evicted_end=3) == 3


@pytest.mark.parametrize(("window_tokens", "page_size"), [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_a_window_or_a_page_without_tokens_is_an_error(window_tokens: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        dead_end(100, window_tokens, page_size)
    with pytest.raises(ConfigError, match="tokens"):
        unshared_dead_end(100, window_tokens, page_size)
    with pytest.raises(ConfigError, match="tokens"):
        is_release_due(100, window_tokens, page_size, evicted_end=0, interval_tokens=1)
