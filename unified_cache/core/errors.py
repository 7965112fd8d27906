"""Every exception this package raises, in one tree, and the checks of arguments that raise them.

A miss, a full pool and "not yet" are return values, never exceptions.

    CacheError
    ├── InputError             what the caller passed is wrong; nothing was changed
    │   ├── TokenError         token ids that are not a flat run of integers in [0, 2**31)
    │   ├── ConfigError        a setting or a combination of settings that cannot work
    │   │   └── MissingExtraError  a package is not installed that an extra of this one brings; an ImportError too
    │   ├── LayoutError        pools or components that contradict each other
    │   ├── SlotError          slots that are not the caller's to free or to insert
    │   ├── LockError          a lock that was released already or belongs to another cache
    │   ├── StaleMatchError    a match that the tree has outlived
    │   └── TraceError         a request trace that is missing or malformed
    ├── StateError             the call is right, the moment or the place is not
    │   ├── ClosedError        the cache or the store was closed
    │   ├── OwnerThreadError   called from another thread than the owner's
    │   ├── CaptureError       a graph is being captured, and would record what the call copies
    │   └── WaitTimeoutError   transfers did not finish in the time given
    ├── CopyError              bytes could not be moved between device and host
    ├── CancelledError         a transfer was ended before its time
    ├── OperationTimeoutError  a transfer took longer than it may
    ├── InternalError          a transfer raised what no part of this package raises on purpose: a bug, and the cause
    ├── RankError              something failed on a rank, and so on every rank of its group
    │   └── RankLostError      a rank died, does not answer, or is out of step: nothing can be agreed on any more
    └── StorageError           a storage backend failed; a miss is not a failure
        ├── StorageFullError   the store has no room left for a page
        └── StorageTimeoutError  a call did not return in time, and is still in flight
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import UnionType
from typing import Protocol

__all__ = [
    "CacheError",
    "CallInFlight",
    "CancelledError",
    "CaptureError",
    "ClosedError",
    "ConfigError",
    "CopyError",
    "InputError",
    "InternalError",
    "LayoutError",
    "LockError",
    "MissingExtraError",
    "NotOfferedError",
    "OperationTimeoutError",
    "OwnerThreadError",
    "RankError",
    "RankLostError",
    "SlotError",
    "StaleMatchError",
    "StateError",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "TokenError",
    "TraceError",
    "WaitTimeoutError",
    "check_each",
    "check_kind",
    "check_text",
    "did_you_mean",
    "foreign_code",
    "without_secrets",
]


class CacheError(Exception):
    """Base of everything this package raises on purpose."""


class InputError(CacheError):
    """An argument is wrong; nothing was changed."""


class TokenError(InputError):
    """Token ids are not a flat run of integers in [0, 2**31)."""


class ConfigError(InputError):
    """A setting, or a combination of settings, cannot work."""


class MissingExtraError(ConfigError, ImportError):
    """A package is not installed that an extra of this package brings; the message has the command that installs it.

    An ``ImportError`` as well, whose ``name`` is the missing package: ``try: import ... except ImportError`` holds.
    """


class LayoutError(InputError):
    """Pools or components contradict each other."""


class SlotError(InputError):
    """Slots are not the caller's to free or to insert."""


class LockError(InputError):
    """A lock was released already, or belongs to another cache."""


class StaleMatchError(InputError):
    """The tree changed since the match was made; match again."""


class TraceError(InputError):
    """A request trace is missing or malformed."""


class StateError(CacheError):
    """The call is right, the moment or the place is not."""


class ClosedError(StateError):
    """The cache or the store was closed."""


class OwnerThreadError(StateError):
    """A cache was used from another thread than the one that owns it."""


class CaptureError(StateError):
    """A graph is being captured, and would record a copy that only this moment needs."""


class WaitTimeoutError(StateError):
    """Transfers did not finish in the time given."""


class CopyError(CacheError):
    """Bytes could not be moved between device and host."""


class CancelledError(CacheError):
    """A transfer was ended before its time; nothing of it was kept."""


class OperationTimeoutError(CacheError):
    """A transfer took longer than it may; nothing of it was kept."""


class InternalError(CacheError):
    """A transfer raised what no part of this package raises on purpose; its ``__cause__`` is the bug to report."""


class RankError(CacheError):
    """Something failed on a rank, and so on every rank of its group."""


class RankLostError(RankError):
    """A rank died, does not answer in time, or is out of step; the group can agree on nothing any more."""


class StorageError(CacheError):
    """A storage backend failed.

    ``retryable`` says whether the same call may succeed later without anyone's help.
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class StorageFullError(StorageError):
    """The store has no room left; what was asked to be stored is not stored."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class NotOfferedError(StorageError):
    """A store does not have what it was asked for, and works: nothing that speaks against it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class CallInFlight(Protocol):
    """An abandoned call to a store, which may still read or fill its buffers."""

    @property
    def name(self) -> str:
        """Method of the store, such as ``get``."""
        ...

    @property
    def started_s(self) -> float:
        """When it started, in seconds of the clock that its deadline was measured with."""
        ...

    @property
    def returned(self) -> bool:
        """Whether the store has returned from the call, and so released its buffers."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the call to return; return whether it has."""
        ...


class StorageTimeoutError(StorageError):
    """A store did not return from a call in time.

    The call goes on: keep its buffers from other use until ``call.returned``. Trying again is safe, with other buffers.
    """

    def __init__(self, message: str, call: CallInFlight) -> None:
        super().__init__(message, retryable=True)
        self.call = call


def check_kind(value: object, kind: type | UnionType, expected: str, error: type[InputError] = InputError) -> None:
    """Raise ``error`` for a value that is no instance of ``kind``; ``expected`` says what it should be."""
    if not isinstance(value, kind):
        raise error(f"expected {expected}, found {_shown(value)}")


def check_each(values: object, kind: type, expected: str, error: type[InputError] = InputError) -> None:
    """Refuse, as ``check_kind``, what is no sequence, or has a member that is no instance of ``kind``."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise error(f"expected {expected}, found {_shown(values)}")
    for value in values:
        check_kind(value, kind, expected, error)


def check_text(name: str, value: object, error: type[InputError] = InputError) -> None:
    """Raise ``error`` for what is no text, or text that UTF-8 cannot encode: its encoding is sent or digested."""
    check_kind(value, str, f"{name} as text", error)
    try:
        str(value).encode()
    except UnicodeEncodeError as flaw:
        raise error(f"{name} must be text that UTF-8 can encode, found {value!r}") from flaw


@contextmanager
def foreign_code(expected: str) -> Iterator[None]:
    """Run other people's code; raise StorageError, which says what was expected, for what is no error of ours."""
    try:
        yield
    except (CacheError, MemoryError):
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {without_secrets(str(error))}"
        raise StorageError(f"{expected}, found {found}", retryable=False) from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error's message, with the known words that are like ``word``; empty if none is."""
    written = {each.lower(): each for each in known}
    close = [written[each] for each in get_close_matches(word.lower(), written)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


_SECRETS = re.compile(
    r"(?<=keys=)(?!file:|env:)[^&]*"
    r"|(?i:(?<=secret=)|(?<=token=)|(?<=password=)|(?<=key=)|(?<=signature=)|(?<=[?&]sig=))[^&#]*"
)
_KEY_DIGITS = re.compile(r"[0-9A-Fa-f]{32,}")


def without_secrets(url: str) -> str:
    """Return the URL of a store as messages, logs and reports have it: ``...`` for credentials and for keys."""
    bare, mark, coding = url.partition("#")
    scheme, colon, rest = bare.partition(":")
    if not colon:
        return _KEY_DIGITS.sub("...", url)
    start, at, place = rest.rpartition("@")
    if at and scheme not in ("file", "packed"):
        slashes = start[: len(start) - len(start.lstrip("/"))]
        bare = f"{scheme}{colon}{slashes}...@{place}"
    return _SECRETS.sub("...", bare + mark + _KEY_DIGITS.sub("...", coding))


def _shown(value: object) -> str:
    """Return a value where it is short, else the name of its type."""
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
