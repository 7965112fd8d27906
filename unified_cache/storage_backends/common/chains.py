"""Dependencies between objects: each page of a chain needs the page before it."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from unified_cache.page import PageKey
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.window import SPAN_ALL, SPAN_UNTOLD

__all__ = ["Chains", "Link", "LinkedPage"]

CHAIN_PAGES_MAX = 1 << 16
"""Pages of the longest chain followed: a prompt of a million tokens in pages of sixteen."""

Link = tuple[bytes, PageKey]
"""Identity and key of a page that something needs."""


class LinkedPage(Protocol):
    """A page that knows the one before it."""

    @property
    def label(self) -> Label:
        """Name of the page."""
        ...

    @property
    def parent(self) -> PageKey | None:
        """Key of the page before it in its chain; None for a first page, or where it is not known."""
        ...


class Chains:
    """Dependencies between objects, as far as the pages that were put and read have shown them.

    An object of a pool that needs every page of a prefix needs the page before its own; one of a windowed pool needs
    its own page in the other pools, and nobody needs it. A pool of which no manifest told a span needs every page.
    Bookkeeping only, not thread-safe.
    """

    __slots__ = ("_needed_count", "_needs", "_windowed")

    def __init__(self) -> None:
        self._needs: dict[Label, Link] = {}
        self._needed_count: dict[Link, int] = {}
        self._windowed: set[tuple[bytes, str]] = set()

    def learn(self, manifest: Manifest) -> None:
        """Note which pools of an identity need the last pages of a prefix alone."""
        for component in manifest.components:
            if component.span not in (SPAN_ALL, SPAN_UNTOLD):
                self._windowed.update((manifest.identity, pool.name) for pool in component.pools)

    def link(self, page: LinkedPage) -> None:
        """Note what a page needs, until ``unlink``."""
        label = page.label
        if label in self._needs:
            return
        key = label.key if (label.identity, label.pool) in self._windowed else page.parent
        if key is None or (key == label.key and key == page.parent):
            return
        link = (label.identity, key)
        self._needs[label] = link
        self._needed_count[link] = self._needed_count.get(link, 0) + 1

    def unlink(self, label: Label) -> None:
        """Note that an object is gone."""
        link = self._needs.pop(label, None)
        if link is None:
            return
        count = self._needed_count.pop(link) - 1
        if count:
            self._needed_count[link] = count

    def need_of(self, label: Label) -> Link | None:
        """Return the page that an object needs, None where that is not known."""
        return self._needs.get(label)

    def before(self, label: Label) -> Iterator[Label]:
        """Walk from an object to the first one of its chain in the same pool, as far as links are known."""
        for _ in range(CHAIN_PAGES_MAX):
            link = self._needs.get(label)
            if link is None or link[1] == label.key:
                return
            label = Label(label.identity, link[1], label.pool)
            yield label

    def is_needed(self, label: Label, gone_count: Mapping[Link, int]) -> bool:
        """Tell whether any object needs this one, those in ``gone_count``, by the page they need, left out."""
        link = (label.identity, label.key)
        count = self._needed_count.get(link, 0)
        return count > gone_count.get(link, 0) and (label.identity, label.pool) not in self._windowed
