"""Workers without threads: a seed decides the order in which jobs end, and repeats it."""

import random

from unified_cache.controller.controller import Finished, run_job
from unified_cache.controller.operation import Job, Operation


class SeededWorkers:
    """Workers that keep jobs waiting and run a random one of them at each call, on the caller's thread.

    Every interleaving of transfers with the owner's calls is thus reached by some seed, and repeated by it.
    """

    __slots__ = ("_rng", "_waiting")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: list[tuple[Operation, Job]] = []

    def submit(self, operation: Operation, job: Job) -> None:
        """Keep ``job`` waiting."""
        self._waiting.append((operation, job))

    def finished(self, timeout_s: float) -> list[Finished]:
        """Run one of the waiting jobs, whichever the seed says; never waits."""
        if not self._waiting:
            return []
        operation, job = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        return [(operation, run_job(job))]

    def close(self, timeout_s: float) -> list[str]:
        """Forget the jobs that wait; there is no worker to stop."""
        self._waiting.clear()
        return []
