"""A wrapper that believes no store: every page read is verified against its label before anyone uses it."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Flaw, PageChecksum, verify_buffers
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.protocol import Answer, PageIO, Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer, check_answers

SUMMED_BYTES_MIN = 4 << 20
"""Pages of a call for less are in the processor's caches when it returns: checksums taken meanwhile gain nothing."""

logger = logging.getLogger(__name__)


class VerifiedStorage(StorageLayer):
    """Answer FLAWED for a page that does not verify, remove it from the wrapped store, and count it by its flaw.

    It reads every payload byte once more, at the speed of xxh3, and copies none: while pages are read where there are
    many bytes of them and the store takes the checksums along, otherwise after it. It owns the wrapped backend:
    closing it closes that. Thread-safe where the backend is.
    """

    def __init__(self, backend: Store) -> None:
        super().__init__(backend)
        self._call_bytes: int | None = None
        self._flaws_count: Counter[Flaw] = Counter()
        self._guard = Lock()

    @property
    def flaws_count(self) -> dict[Flaw, int]:
        """Pages found flawed so far; a copy, flaws never seen are absent."""
        with self._guard:
            return dict(self._flaws_count)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; HIT only where they hold the page of its label, or where there are none."""
        hits: list[Answer] = []
        parts = ((pages, page_bytes(pages[0])),) if len(pages) == 1 else self._parts(pages)
        for part, asked_bytes in parts:
            is_summed = asked_bytes >= SUMMED_BYTES_MIN
            asked = summed(part) if is_summed else part
            answers = self._backend.get(asked)
            check_answers(self._backend, Method.GET, answers, len(asked))
            self._refuse_flawed(asked, answers, is_summed=is_summed)
            hits += answers
        return hits

    def _parts(self, pages: Sequence[PageIO]) -> Sequence[tuple[Sequence[PageIO], int]]:
        """Cut a batch into the calls that the wrapped backend likes best; each comes with its bytes."""
        parts: list[tuple[Sequence[PageIO], int]] = []
        if self._call_bytes is None:
            self._call_bytes = self._backend.capability().call_bytes
        start = taken_bytes = 0
        for end, page in enumerate(pages, 1):
            taken_bytes += page_bytes(page)
            if taken_bytes >= self._call_bytes or end == len(pages):
                parts.append((pages[start:end], taken_bytes))
                start, taken_bytes = end, 0
        return parts

    def _refuse_flawed(self, pages: Sequence[PageIO], answers: list[Answer], *, is_summed: bool) -> None:
        """Make hits that do not verify FLAWED, count them, and remove them from the wrapped backend."""
        flaws: dict[int, Flaw] = {}
        for number, page in enumerate(pages):
            if answers[number] is Answer.HIT and page.buffers:
                flaw = verify_buffers(page.buffers, page.label, page.checksum if is_summed else None)
                if flaw is not None:
                    flaws[number] = flaw
        if not flaws:
            return
        with self._guard:
            self._flaws_count.update(flaws.values())
        for number, flaw in flaws.items():
            answers[number] = Answer.FLAWED
            name = pages[number].label.object_name
            logger.warning("a page that storage returned is flawed (%s): %s", flaw.value, name)
        # A page that cannot be removed is found flawed again by the next get; the answer here stays right.
        with suppress(StorageError):
            self._backend.remove([pages[number].label for number in flaws])


def summed(pages: Sequence[PageIO]) -> list[PageIO]:
    """Give each page a new checksum for its store to add to, whatever it had."""
    return [PageIO(label, buffers, PageChecksum()) for label, buffers, _ in pages]
