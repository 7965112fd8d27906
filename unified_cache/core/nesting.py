"""Values that users write as JSON or TOML, nested no deeper than a function that calls itself may walk."""

import json
import tomllib
from collections.abc import Iterable

__all__ = ["DEPTH_MAX", "parse_json", "parse_toml"]

DEPTH_MAX = 100
"""Lists or tables within each other; the deepest values that we read have less than 10."""


def parse_json(text: str | bytes) -> object:
    """Return the value of a JSON text; a ValueError if it is none, or nested more than ``DEPTH_MAX`` deep."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    if isinstance(text, bytes):
        brackets_count = text.count(b"[") + text.count(b"{")
    else:
        brackets_count = text.count("[") + text.count("{")
    # A text cannot be deeper than it has brackets: of a line of a trace nothing more is looked at.
    if brackets_count > DEPTH_MAX:
        _check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, object]:
    """Return the values of a TOML text; a ValueError (TOMLDecodeError) if it is none, or nested too deep."""
    try:
        values: dict[str, object] = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(values)
    return values


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise _too_deep()


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"lists or tables within each other more than {DEPTH_MAX} deep")
