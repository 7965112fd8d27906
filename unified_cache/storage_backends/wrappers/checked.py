"""A wrapper that checks what a store answers: an answer that the protocol does not allow becomes an error."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from unified_cache.core.errors import StorageError
from unified_cache.core.page import PAGE_KEY_BYTES
from unified_cache.core.seal import Label
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.names import IDENTITY_BYTES
from unified_cache.storage_backends.protocol import (
    Answer,
    Capability,
    Level,
    PageIO,
    Scan,
    StoredObject,
    UsedBetween,
)
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

Result = TypeVar("Result")

READS = frozenset({Answer.HIT, Answer.MISS, Answer.FLAWED, Answer.UNAVAILABLE})
PUTS = frozenset({Answer.STORED, Answer.DECLINED, Answer.UNAVAILABLE})

OBJECT = f"with a key of {PAGE_KEY_BYTES} bytes, a pool that is text, and its length in bytes"


class CheckedStorage(StorageLayer):
    """Raise StorageError, not retryable, where a store answers what its method cannot; pass every other answer on.

    It stands next to the store, below counts, deadline, retries and breaker, so that none of them meets a wrong answer:
    for them a store that gives one has failed. A batch is checked without a step of Python for each page. Bytes of
    pages are not looked at; ``VerifiedStorage`` does that.

    It owns the wrapped backend. Thread-safe where the backend is.
    """

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend."""
        return self._answers(Method.EXISTS, self._backend.exists(labels), len(labels), READS)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers."""
        return self._answers(Method.GET, self._backend.get(pages), len(pages), READS)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages."""
        return self._answers(Method.PUT, self._backend.put(pages, level), len(pages), PUTS)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend."""
        found = super().scan(identity, cursor)
        for listed in found.objects:
            if not _is_object_of(listed, identity):
                raise self._wrong(Method.SCAN, f"objects of identity {identity.hex()}, each {OBJECT}", listed)
        return found

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        found = work()
        rule = RULES.get(method)
        if rule is not None and not rule.is_right(found):
            raise self._wrong(method, rule.expected, found)
        return found

    def _answers(
        self, method: Method, answers: list[Answer], asked_count: int, allowed: frozenset[Answer]
    ) -> list[Answer]:
        if not _are_answers(answers, asked_count, allowed):
            names = ", ".join(sorted(answer.name for answer in allowed))
            raise self._wrong(method, f"a list of {asked_count} answers, each of {names}", answers, allowed)
        return answers

    def _wrong(
        self, method: Method, expected: str, found: object, allowed: frozenset[Answer] = frozenset()
    ) -> StorageError:
        kind = type(self._backend)
        name = f"{kind.__module__}.{kind.__qualname__}.{method.value}"
        return StorageError(f"{name} must return {expected}, found {_shown(found, allowed)}", retryable=False)


def _are_answers(answers: object, asked_count: int, allowed: frozenset[Answer]) -> bool:
    if not isinstance(answers, list) or len(answers) != asked_count:
        return False
    try:
        return allowed.issuperset(answers)
    except TypeError:  # an answer that has no hash
        return False


def _is_count(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0


def _is_object_of(listed: object, identity: bytes) -> bool:
    if (
        not isinstance(listed, StoredObject)
        or not isinstance(listed.label, Label)
        or not _is_count(listed.object_bytes)
    ):
        return False
    label = listed.label
    is_key = isinstance(label.key, bytes) and len(label.key) == PAGE_KEY_BYTES
    return label.identity == identity and is_key and isinstance(label.pool, str)


def _are_manifests(found: object) -> bool:
    return found is None or (
        isinstance(found, dict)
        and all(
            isinstance(digest, bytes) and len(digest) == IDENTITY_BYTES and isinstance(manifest, Manifest | None)
            for digest, manifest in found.items()
        )
    )


def _shown(found: object, allowed: frozenset[Answer]) -> str:
    """Return the part of a wrong answer that is wrong, on one short line."""
    if isinstance(found, list) and allowed:
        for number, answer in enumerate(found):
            if not _are_answers([answer], 1, allowed):
                return f"{answer!r:.80} at index {number}"
        return f"a list of {len(found)}"
    return f"{found!r:.80} of type {type(found).__name__}"


class Rule(NamedTuple):
    """Return value that a method may have, whatever it was asked."""

    is_right: Callable[[object], bool]
    expected: str


RULES = {
    Method.CAPABILITY: Rule(lambda found: isinstance(found, Capability), "a Capability"),
    Method.REGISTER: Rule(lambda found: found is None, "None"),
    Method.TOUCH: Rule(lambda found: found is None, "None"),
    Method.REMOVE: Rule(_is_count, "the number of objects removed, an int"),
    Method.CLEAR: Rule(_is_count, "the number of objects removed, an int"),
    Method.SCAN: Rule(
        lambda found: isinstance(found, Scan) and isinstance(found.objects, list) and isinstance(found.cursor, str),
        "a Scan of a list of StoredObject and a cursor that is text",
    ),
    Method.MANIFESTS: Rule(_are_manifests, f"None, or a dict of Manifest or None by digest, {IDENTITY_BYTES} bytes"),
    Method.USED_BETWEEN: Rule(
        lambda found: (
            found is None or (isinstance(found, UsedBetween) and all(isinstance(each, int) for each in found))
        ),
        "UsedBetween of two ints, or None",
    ),
}
