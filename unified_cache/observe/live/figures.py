"""Figures of one moment: what each tier holds, what was found, moved and stored; values, and their JSON.

What every request changes is made again at every update of a page, so it is plain tuples.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

__all__ = [
    "FIGURES_FORMAT",
    "ComponentFigures",
    "FoundPages",
    "LinkFigures",
    "LiveFigures",
    "LiveSource",
    "OperationFigures",
    "SlowFigures",
    "SourceKind",
    "StoreFigures",
    "TenantFigures",
]

FIGURES_FORMAT = 4
"""Version of the JSON; raised when a field means something else or goes away."""


class SourceKind(Enum):
    """Kind of the source of the figures."""

    CACHE = "cache"
    SERVICE = "service"


class ComponentFigures(NamedTuple):
    """Pages of one component on one tier: the parts add up to the capacity."""

    tier: str
    component: str
    capacity: int
    pinned: int
    """Held, and locks keep it from eviction."""
    evictable: int
    """Held, and the next to go."""
    in_flight: int
    """Handed out to requests and transfers."""
    free: int
    evicted: int
    """Since the start."""


class FoundPages(NamedTuple):
    """Pages that look-ups asked for since the start, by the tier that had them; of a service, objects of pages."""

    lookups: int
    device: int
    host: int
    prefetched: int
    """Of ``host``: pages that a prefetch had brought from storage, for a cache, whose storage answers no look-up."""
    storage: int
    """Pages that storage itself had, for a service."""
    missed: int


class LinkFigures(NamedTuple):
    """Payload moved one way between two tiers since the start."""

    name: str
    """Kind of transfer: backup, load, store, prefetch; of a service, received and sent."""
    pages: int | None
    """None where only bytes are counted."""
    bytes: int


class OperationFigures(NamedTuple):
    """Operations, or calls of a service, of one kind that are over, by outcome."""

    kind: str
    done: int
    failed: int
    cancelled: int
    declined: int
    """Not begun: too many were under way, or the caller was over its quota."""
    partial: int = 0
    """Ended well and left pages out; of a cache's operations alone."""


class SlowFigures(NamedTuple):
    """One of the slowest operations of the last minutes."""

    kind: str
    outcome: str
    pages: int | None
    """None for a call of a service."""
    seconds: float
    ended_at_s: float
    """In seconds since the epoch."""

    def as_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return {**self._asdict(), "seconds": round(self.seconds, 6), "ended_at_s": round(self.ended_at_s, 3)}


class StoreFigures(NamedTuple):
    """State of the store that is attached, and of the guard around it."""

    breaker: str | None
    """closed, open or half open; None for a store without a guard."""
    refused_calls: int
    """Calls that the breaker answered without the store."""
    retried_calls: int
    stuck_calls: int
    """Calls that the store has not returned from in time."""
    flawed_pages: int
    """Pages that did not verify, each a miss."""
    answers: tuple[tuple[str, str, int], ...]
    """Method, answer and count."""

    def as_json(self) -> dict[str, object]:
        """Return the fields by name."""
        answers = [{"method": method, "answer": answer, "count": count} for method, answer, count in self.answers]
        return {**self._asdict(), "answers": answers}


class TenantFigures(NamedTuple):
    """Calls and bytes of one tenant of a service."""

    tenant: str
    running_calls: int
    waiting_calls: int
    bytes_in_flight: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """Everything that the page shows of one moment. Counts are since the cache or the service began."""

    kind: SourceKind
    name: str
    counted_at_s: float
    """Time of the figures, in seconds since the epoch: when they were published, not when they were read."""
    components: tuple[ComponentFigures, ...]
    found: FoundPages
    links: tuple[LinkFigures, ...]
    operations_live: int
    operations: tuple[OperationFigures, ...]
    slowest: tuple[SlowFigures, ...]
    store: StoreFigures | None
    """None where none is attached."""
    tenants: tuple[TenantFigures, ...] | None
    """None for a cache, which has none."""

    def as_json(self, *, with_tenants: bool) -> dict[str, object]:
        """Return the fields under stable names; tenants only for those who may know them."""
        tenants = self.tenants if with_tenants else None
        return {
            "kind": self.kind.value,
            "name": self.name,
            "counted_at_s": self.counted_at_s,
            "components": [{**each._asdict(), "unit": "pages"} for each in self.components],
            "found": self.found._asdict(),
            "links": [each._asdict() for each in self.links],
            "operations_live": self.operations_live,
            "operations": [each._asdict() for each in self.operations],
            "slowest": [each.as_json() for each in self.slowest],
            "store": None if self.store is None else self.store.as_json(),
            "tenants": None if tenants is None else [each._asdict() for each in tenants],
        }


class LiveSource(Protocol):
    """Source of figures. Thread-safe and quick; what it reports on never waits for it."""

    def figures(self) -> LiveFigures:
        """Return the figures of this moment, or those published last: the same object as before if nothing changed."""
        ...
