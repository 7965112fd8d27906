"""Values that users write: as deep as they may be nested, and no deeper."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.core.byte_sizes import bytes_literal, bytes_text, parse_bytes
from unified_cache.core.errors import ConfigError
from unified_cache.core.nesting import DEPTH_MAX, parse_json, parse_toml

DEEP = (DEPTH_MAX + 1, 900, 5_000, 100_000)
"""One too many, nearly and about as many as Python itself gives up at, and far more."""


def lists(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


def tables(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("nested", [lists, tables])
def test_json_is_read_as_deep_as_it_may_be_nested(nested: Callable[[int], str]) -> None:
    assert parse_json(nested(DEPTH_MAX)) == parse_json(nested(DEPTH_MAX).encode())
    assert parse_json(f"[{'[],' * 1_000}[]]") == [[]] * 1_001


@pytest.mark.parametrize("depth", DEEP)
@pytest.mark.parametrize("nested", [lists, tables])
def test_json_that_is_nested_deeper_is_refused(nested: Callable[[int], str], depth: int) -> None:
    for text in (nested(depth), nested(depth).encode()):
        with pytest.raises(ValueError, match="within each other more than 100 deep"):
            parse_json(text)


@pytest.mark.parametrize("depth", [depth for depth in DEEP if depth < 10_000])
def test_toml_that_is_nested_deeper_is_refused(depth: int) -> None:
    for text in (f"a = {lists(depth)}", "a." * depth + "a = 1"):
        with pytest.raises(ValueError, match="within each other more than 100 deep"):
            parse_toml(text)


def test_toml_is_read_as_deep_as_it_may_be_nested() -> None:
    assert parse_toml("a." * (DEPTH_MAX - 1) + "a = 1")


# ---- sizes in bytes ------------------------------------------------------------------------------------------------


COUNTS = st.one_of(
    st.integers(0, 1 << 50), st.builds(lambda count, unit: count << unit, st.integers(0, 4096), st.integers(0, 44))
)


@given(COUNTS)
def test_a_size_as_a_file_has_it_is_read_exactly(count: int) -> None:
    assert parse_bytes("--size", bytes_literal(count)) == count


@pytest.mark.parametrize(
    ("count", "text", "literal"),
    [
        (0, "0 B", "0"),
        (1023, "1023 B", "1023"),
        (1536, "1.5 KiB", "1536"),
        (256 << 20, "256.0 MiB", "256MiB"),
        (20 * 10**12, "18.2 TiB", "19531250000KiB"),
        (5000 << 40, "5,000.0 TiB", "5000TiB"),
    ],
)
def test_a_size_is_said_in_its_largest_unit(count: int, text: str, literal: str) -> None:
    assert bytes_text(count) == text
    assert bytes_literal(count) == literal


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3MB", "4 gigabytes", -1, True])
def test_what_is_no_size_is_refused_by_the_option_s_name(text: str | int) -> None:
    with pytest.raises(ConfigError, match="--size must be bytes as in 4096"):
        parse_bytes("--size", text)
