"""Checks of what callers pass: a value of another kind is an error of ours that says what was expected."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import UnionType

from unified_cache.errors import InputError

__all__ = ["check_each", "check_kind", "check_text", "did_you_mean"]


def check_kind(value: object, kind: type | UnionType, expected: str, error: type[InputError] = InputError) -> None:
    """Refuse a value that is no instance of ``kind``; ``expected`` says what it should be.

    Raises:
        InputError: it is none; of the type ``error``.
    """
    if not isinstance(value, kind):
        raise error(f"expected {expected}, found {_shown(value)}")


def check_each(values: object, kind: type, expected: str, error: type[InputError] = InputError) -> None:
    """Refuse what is no sequence, or has a member that is no instance of ``kind``.

    Raises:
        InputError: as ``check_kind``.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise error(f"expected {expected}, found {_shown(values)}")
    for value in values:
        check_kind(value, kind, expected, error)


def check_text(name: str, value: object, error: type[InputError] = InputError) -> None:
    """Refuse what is no text, or text that UTF-8 cannot encode: its encoding is sent, or digests are taken of it.

    Raises:
        InputError: it is that; of the type ``error``.
    """
    check_kind(value, str, f"{name} as text", error)
    try:
        str(value).encode()
    except UnicodeEncodeError as flaw:
        raise error(f"{name} must be text that UTF-8 can encode, found {value!r}") from flaw


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error's message, with the known words that are like ``word``; empty if none is."""
    written = {each.lower(): each for each in known}
    close = [written[each] for each in get_close_matches(word.lower(), written)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _shown(value: object) -> str:
    """Return a value where it is short, else the name of its type."""
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
