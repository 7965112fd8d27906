"""Pages that the job of an operation reads, and slots that its operation has: in the tree's hands or in its own."""

from collections import Counter

import numpy as np

from tests.sim.audit import KEYS_MAX, Audit, Claim
from tests.sim.memory import Contents
from tests.sim.workers import ScheduledJob
from tests.support.cache_model import Flow, flow_of
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller.jobs import BackupJob, FetchJob, LoadJob, StoreJob
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier


class JobClaims:
    """Claims of the jobs of one cache."""

    def __init__(self, cache: UnifiedCache, audit: Audit, happened: Counter[str]) -> None:
        self._cache = cache
        self._audit = audit
        self._happened = happened
        self._components = len(cache.layout.components)
        self.bounced: set[ScheduledJob] = set()
        """Jobs whose host slots are the operation's own from the first to the last: the tree never has them."""

    def claim(self, task: ScheduledJob, prompt: Prompt, numbers: Contents) -> Claim:
        """Say what a job has out, what it reads in the tree, and what it brings from tier to tier."""
        flow = flow_of(task.job, prompt)
        if not flow.parts:
            return Claim()
        components = np.repeat([part.component for part in flow.parts], [len(part) for part in flow.parts])
        pages = numbers[np.concatenate([part.pages for part in flow.parts])]
        claim = Claim()
        bounces = self._bounces(task, flow)
        if bounces:
            self.bounced.add(task)
            self._happened[f"bounced by {type(task.job).__name__}"] += 1
        if flow.source is not None:
            slots = np.concatenate([part.source for part in flow.parts])
            tier_components = components + flow.source * self._components
            if bounces and flow.source is Tier.HOST:
                stores = isinstance(task.job, StoreJob)
                slots = np.concatenate([part.target if stores else part.source for part in flow.parts])
                claim = claim._replace(out=slots + self._audit.bases[tier_components])
            else:
                claim = claim._replace(read_tier_components=tier_components, read_numbers=pages, read_slots=slots)
        if flow.target is not None:
            tier_components = components + flow.target * self._components
            out = np.concatenate([part.target for part in flow.parts]) + self._audit.bases[tier_components]
            fetch = self._cache._prefetches._under_way.get(task.operation)
            if isinstance(task.job, FetchJob) and fetch is not None and fetch.staging is not None:
                reserved = enumerate(fetch.staging.slots)  # without those that the tree has taken
                out = np.concatenate(
                    [slots + self._audit.bases[self._components + number] for number, slots in reserved]
                )
            claim = claim._replace(out=np.concatenate((claim.out, out)))
            if flow.source is not None and not bounces:
                claim = claim._replace(marked=tier_components * KEYS_MAX + pages)
        return claim

    def _bounces(self, task: ScheduledJob, flow: Flow) -> bool:
        """Tell whether the host slots of a job are neither the tree's nor on their way into it."""
        if isinstance(task.job, StoreJob):
            allocators = self._cache._ledger._allocators[Tier.HOST]
            return any(len(part) and allocators[part.component].is_out(part.target) for part in flow.parts)
        if not isinstance(task.job, BackupJob | LoadJob):
            return False
        moved = list(task.job._parts.values())
        return not any(
            part is one for transfer in self._cache._ledger.transfers for part in transfer.parts for one in moved
        )
