"""Figures of a server for its live page, and whom the page lets in."""

import time
from collections import Counter
from dataclasses import dataclass

from prometheus_client import Counter as MetricsCounter

from unified_cache.observe.live.authenticator import View
from unified_cache.observe.live.figures import (
    FoundPages,
    LinkFigures,
    LiveFigures,
    OperationFigures,
    SourceKind,
    StoreFigures,
    TenantFigures,
)
from unified_cache.proto.wire.calls import Call
from unified_cache.service.access.callers import Caller, Role
from unified_cache.service.access.fairness import FairScheduler, TenantCalls
from unified_cache.service.access.tokens import Tokens
from unified_cache.service.access.usage import TenantUsage
from unified_cache.service.operations.metrics import ServiceMetrics
from unified_cache.service.store.guarded import GuardedStore
from unified_cache.storage_backends.protocol import Answer

__all__ = ["ServiceAuthenticator", "ServiceFigures"]

TENANTS_MAX = 100
"""Tenants shown: those that have stored most."""

OUTCOMES = {"OK": "done", "CANCELLED": "cancelled", "RESOURCE_EXHAUSTED": "declined"}
"""Outcome of a call by its status; any other is a failure."""

_NO_CALLS = TenantCalls(0, 0, 0, 0)


class ServiceAuthenticator:
    """Authenticator of a server's live page: callers of the server may look, an administrator sees tenants too."""

    def __init__(self, tokens: Tokens | None, local: Caller) -> None:
        """Take the tokens of callers; without any everybody who reaches the page is ``local``."""
        self.needs_token = tokens is not None
        self._tokens = tokens
        self._local = local

    def view(self, token: str | None) -> View | None:
        """Return the view of a token's caller; None for a token that is no caller's."""
        caller = self._local if self._tokens is None else self._tokens.caller(token or "")
        if caller is None:
            return None
        return View.EVERYTHING if caller.role.includes(Role.ADMIN) else View.FIGURES


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """Source of the figures of one server, which its parts count for any thread; a ``LiveSource``."""

    name: str
    guarded: GuardedStore
    metrics: ServiceMetrics
    scheduler: FairScheduler
    usage: TenantUsage

    def figures(self) -> LiveFigures:
        """Return the figures of this moment."""
        calls = self.scheduler.by_tenant()
        running_count = sum(each.running_count for each in calls.values())
        moved = _summed(self.metrics.bytes, "direction")
        return LiveFigures(
            kind=SourceKind.SERVICE,
            name=self.name,
            counted_at_s=time.time(),
            components=(),
            found=self._found(),
            links=(LinkFigures("received", None, moved["in"]), LinkFigures("sent", None, moved["out"])),
            operations_live=running_count,
            operations=self._calls(),
            slowest=self.metrics.slowest_calls(),
            store=self._store(),
            tenants=self._tenants(calls),
        )

    def _found(self) -> FoundPages:
        counts = _summed(self.metrics.pages, "result")
        hits = counts[Answer.HIT.value]
        lookups = _summed(self.metrics.calls, "method")[Call.LOOKUP.value]
        return FoundPages(lookups, device=0, host=0, prefetched=0, storage=hits, missed=counts.total() - hits)

    def _calls(self) -> tuple[OperationFigures, ...]:
        by_method: dict[str, Counter[str]] = {}
        for key, count in _summed(self.metrics.calls, "method", "code").items():
            method, _, code = key.partition(" ")
            by_method.setdefault(method, Counter())[OUTCOMES.get(code, "failed")] += count
        return tuple(
            OperationFigures(method, counts["done"], counts["failed"], counts["cancelled"], counts["declined"])
            for method, counts in sorted(by_method.items())
        )

    def _store(self) -> StoreFigures:
        guard = self.guarded.guard
        counts = _summed(self.metrics.pages, "result")
        puts = _summed(self.metrics.put_pages, "result")
        return StoreFigures(
            breaker=guard.breaker.state.value,
            refused_calls=guard.breaker.refused_count,
            retried_calls=guard.retries_count,
            stuck_calls=guard.stuck_count,
            flawed_pages=sum(self.guarded.verified.flaws_count.values()),
            answers=tuple(
                (method, answer, count)
                for method, answers in (("look-up", counts), ("put", puts))
                for answer, count in sorted(answers.items())
            ),
        )

    def _tenants(self, calls: dict[str, TenantCalls]) -> tuple[TenantFigures, ...]:
        stored = self.usage.by_tenant()
        names = sorted(stored.keys() | calls.keys(), key=lambda name: (-stored.get(name, 0), name))
        return tuple(
            TenantFigures(name, found.running_count, found.waiting_count, found.bytes_in_flight, stored.get(name, 0))
            for name, found in ((name, calls.get(name, _NO_CALLS)) for name in names[:TENANTS_MAX])
        )


def _summed(counter: MetricsCounter, *labels: str) -> Counter[str]:
    """Sum a metric over all labels but these; the sums are under their values, with a space between."""
    sums: Counter[str] = Counter()
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                sums[" ".join(sample.labels[label] for label in labels)] += int(sample.value)
    return sums
