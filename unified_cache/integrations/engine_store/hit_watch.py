"""One line in the log, once an engine has used its store for a while and nothing was restored from it."""

import logging
from threading import Lock

from unified_cache.core.errors import without_secrets
from unified_cache.integrations.engine_store.store import EngineStore
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

logger = logging.getLogger(__name__)

REQUESTS_MIN = 16
"""Requests after which it is said that nothing was restored."""


class HitWatch:
    """Counts an engine's requests until something is restored, or it is time to say that nothing was. Thread-safe."""

    def __init__(self, store: EngineStore, url: str, document: str) -> None:
        """``document`` is the section of a document that says what to do."""
        self._store = store
        self._url = without_secrets(url)
        self._document = document
        self._left = REQUESTS_MIN
        self._guard = Lock()

    def count_request(self) -> None:
        """Count a request; after the last one, log what the store was asked for, unless it gave anything."""
        with self._guard:
            self._left -= 1
            if self._left:
                return
        counts = self._store.counts()
        if counts.answers.get((Method.GET, Answer.HIT)):
            return
        looked_up, offered = (
            sum(count for (method, _), count in counts.answers.items() if method is wanted)
            for wanted in (Method.EXISTS, Method.PUT)
        )
        found, stored = (
            counts.answers.get((Method.EXISTS, Answer.HIT), 0),
            counts.answers.get((Method.PUT, Answer.STORED), 0),
        )
        logger.log(
            logging.INFO if looked_up and stored else logging.WARNING,
            "nothing was restored from %s for %d requests: %d of %d pages looked up were found, %d of %d offered were "
            "stored%s. See %s",
            self._url,
            REQUESTS_MIN,
            found,
            looked_up,
            stored,
            offered,
            f"; the store said: {counts.last_error}" if counts.last_error else "",
            self._document,
        )
