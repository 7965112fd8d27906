"""Values that users write: as deep as they may be nested, and no deeper."""

from collections.abc import Callable

import pytest

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
