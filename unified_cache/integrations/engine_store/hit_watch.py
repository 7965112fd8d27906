"""The reason why nothing is restored: one line in the log, once an engine has used its store for a while without a hit.

    none looked up                                prompts are too short
    pages of this identity from before, no hit    they have other keys: hash seed, salt, text
    pages of the same model, another identity     a fact differs

The line says what shows the reason, and which section of a document mends it.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from threading import Lock

from unified_cache.core.errors import CacheError, StorageError, without_secrets
from unified_cache.core.pool import Identity
from unified_cache.integrations.engine_store.store import EngineStore
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.bounded_call import BoundedCall
from unified_cache.storage_backends.common.call_threads import CallThreads
from unified_cache.storage_backends.manifest import described_by
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

__all__ = ["REQUESTS_MIN", "EngineHints", "HitWatch", "WhyNoHit"]

logger = logging.getLogger(__name__)

REQUESTS_MIN = 16
"""Requests after which it is said that nothing was restored."""

DIFFERENCES_MAX = 3
"""Facts of another identity that are named."""


@dataclass(frozen=True, slots=True)
class EngineHints:
    """Words of one engine."""

    document: str
    """Section of a document that says what to do about each reason."""
    short: Callable[[], str]
    """Which prompts are not looked up, in a sentence."""
    keys: Callable[[], str]
    """What gives the same text other keys, in a sentence."""


class WhyNoHit(Enum):
    """Reason why nothing was restored."""

    SHORT = "prompts are too short"
    OTHER_KEYS = "pages have other keys"
    OTHER_IDENTITY = "pages have another identity"
    NOTHING_STORED = "nothing is stored yet"
    NOTHING_AGAIN = "no prompt that was stored came again"


class HitWatch:
    """Counts an engine's requests until something is restored, or it is time to say why not. Thread-safe."""

    def __init__(
        self, store: EngineStore, url: str, hints: EngineHints, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Start to count; pages used before now by ``clock_ns``, nanoseconds since 1970, are another engine's."""
        self._store = store
        self._url = without_secrets(url)
        self._hints = hints
        self._started_ns = clock_ns()
        self._left = REQUESTS_MIN
        self._guard = Lock()
        self._threads = CallThreads("engine-store-reason", 1)
        self._warning: BoundedCall[None] | None = None

    def count_request(self) -> None:
        """Count a request; with the last one, look for the reason on a thread of its own."""
        with self._guard:
            self._left -= 1
            if self._left:
                return
            self._warning = self._threads.submit(self._warn)
            self._threads.close(0)  # it ends with this call

    def wait(self, timeout_s: float) -> bool:
        """Wait until the line is in the log, if it is being looked for; False after ``timeout_s``."""
        return self._warning is None or self._warning.settle(timeout_s)

    def reason(self) -> tuple[WhyNoHit, str] | None:
        """Return why nothing was restored, and what shows it, for people; None where something was.

        Raises:
            CacheError: the store does not answer.
        """
        counts = self._store.counts()
        by_method = {method: sum(counts.answers.get((method, each), 0) for each in Answer) for method in Method}
        if counts.answers.get((Method.GET, Answer.HIT)):
            return None
        if not by_method[Method.EXISTS]:
            return WhyNoHit.SHORT, self._hints.short()
        stored = counts.answers.get((Method.PUT, Answer.STORED), 0)
        catalog, mine = self._store.catalog(), self._store.identities()
        if catalog is not None:
            for digest in mine:
                used = catalog.used_between(digest)
                if used is not None and used.oldest_ns < self._started_ns:
                    return WhyNoHit.OTHER_KEYS, f"the store has pages from before; {self._hints.keys()}"
            others = [each for digest, each in catalog.manifests().items() if digest not in mine]
            nearest = _nearest(mine.values(), _described(others))
            if nearest:
                return WhyNoHit.OTHER_IDENTITY, f"the store has pages of this model with another {nearest}"
        if not stored:
            said = counts.last_error or f"{by_method[Method.PUT]} pages were offered"
            return WhyNoHit.NOTHING_STORED, f"the store has taken no page: {said}"
        return WhyNoHit.NOTHING_AGAIN, f"{stored} pages are stored; what memory still has is not asked for"

    def _warn(self) -> None:
        try:
            found = self.reason()
        except CacheError:
            return  # it has a line of its own in the log
        if found is not None:
            reason, shown = found
            level = logging.INFO if reason is WhyNoHit.NOTHING_AGAIN else logging.WARNING
            line = "nothing was restored from %s for %d requests: %s. %s. See %s"
            logger.log(level, line, self._url, REQUESTS_MIN, reason.value, shown, self._hints.document)


def _described(manifests: Iterable[Manifest | None]) -> list[Identity]:
    """Return the identities of those manifests that this version reads."""
    identities: list[Identity] = []
    for manifest in manifests:
        with suppress(StorageError):
            if manifest is not None:
                identities.append(described_by(manifest).identity)
    return identities


def _nearest(mine: Collection[Identity], others: Collection[Identity]) -> str:
    """Return what tells the most similar identity of the same model apart; empty where there is none."""
    pairs = [
        (here, there) for here in mine for there in others if (here.model, here.shard) == (there.model, there.shard)
    ]
    differences = [here.differences(there) for here, there in pairs if here.generation == there.generation]
    return ", ".join(min(filter(None, differences), key=len, default=[])[:DIFFERENCES_MAX])
