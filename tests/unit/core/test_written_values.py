"""Values that users write: as deep as they may be nested, and no deeper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.core.errors import ConfigError
from unified_cache.core.files import parse_json, parse_toml
from unified_cache.core.sizes import bytes_literal, bytes_text, parse_bytes, short_size


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000])
def test_text_that_is_nested_too_deep_is_refused_as_any_that_is_no_value(nested: str) -> None:
    for text in (nested, nested.encode()):
        with pytest.raises(ValueError, match="too deep"):
            parse_json(text)
    with pytest.raises(ValueError, match="too deep"):
        parse_toml(f"a = {nested.replace(':', '=')}")


# ---- sizes in bytes ------------------------------------------------------------------------------------------------


COUNTS = st.one_of(
    st.integers(0, 1 << 50), st.builds(lambda count, unit: count << unit, st.integers(0, 4096), st.integers(0, 44))
)


@given(COUNTS)
def test_a_size_as_a_file_has_it_is_read_exactly(count: int) -> None:
    assert parse_bytes("--size", bytes_literal(count)) == count


@given(COUNTS)
def test_a_short_size_is_read_as_about_the_same(count: int) -> None:
    assert parse_bytes("--size", short_size(count)) == pytest.approx(count, rel=0.01)
    assert len(short_size(count)) <= 7


@pytest.mark.parametrize(
    ("count", "text", "literal"),
    [
        (0, "0 B", "0"),
        (1023, "1023 B", "1023"),
        (1536, "1.5 KiB", "1536"),
        (256 << 20, "256.0 MiB", "256MiB"),
        (20 * 10**12, "18.2 TiB", "20TB"),
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
