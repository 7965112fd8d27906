"""Versions of an engine that ours are checked with, and the line that every other one gets."""

import logging
import re
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Versions that one of our classes is checked with, both ends among them."""

    name: str
    """Of the class."""
    engine: str
    oldest: str
    newest: str
    document: str
    """Page that says more."""

    def __contains__(self, found: str) -> bool:
        """Return whether a version is one of them: a patch of the newest is, as far as its number does not count."""
        oldest, newest = _numbers(self.oldest), _numbers(self.newest)
        return oldest <= _numbers(found)[: len(oldest)] <= newest

    def line(self, found: str) -> str:
        """Return what somebody with another version reads."""
        checked = self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return f"{self.name} is checked with {self.engine} {checked}, see {self.document}; found {self.engine} {found}"

    def warn(self, found: str) -> None:
        """Log the line if the version is none of them."""
        if found not in self:
            logger.warning("%s", self.line(found))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
