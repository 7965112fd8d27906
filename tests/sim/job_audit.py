"""Each job against what it was made for: which objects it names to the store, in which order, and what it says came."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import pairwise

from tests.sim.memory import ContentMemory, Moved
from tests.support.store_calls import StoreCall
from unified_cache.controller.jobs import BackupJob, FetchJob, LoadJob, ProbeJob, StoreJob
from unified_cache.controller.operation import Job
from unified_cache.core.errors import CacheError
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.pool import ModelLayout, PageCopies, PoolSpec
from unified_cache.core.seal import Label, verify_buffers
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.layer import Method

METHOD_OF = {StoreJob: Method.PUT, FetchJob: Method.GET, ProbeJob: Method.EXISTS}
"""What each job that names objects asks of the store."""


class PutAs(Enum):
    """Standing of a job that puts pages, towards clears of the store."""

    ALLOWED = "allowed"
    BARRED = "barred"
    """It began while the store was cleared, or while a void one was under way: it puts nothing."""
    VOID = "void"
    """The store was cleared while it ran: it takes back what it has put."""


class JobAudit:
    """Compares jobs that have run, each as a whole, with what they were made for."""

    def __init__(
        self,
        layout: ModelLayout,
        owners: Mapping[str, bytes],
        memory: ContentMemory,
        holds: Callable[[Label], bool],
    ) -> None:
        """``holds`` tells whether the store holds an object."""
        self._holds = holds
        self._owners = owners
        self._memory = memory
        self._pools = [[pool for pool in part.pools if pool.page_bytes] for part in layout.components]
        first, *others = [[(number, pool.name) for pool in pools] for number, pools in enumerate(self._pools)]
        anchors, sidecars = [pools[0] for pools in others], [pool for pools in others for pool in pools[1:]]
        self._order = [*first, *anchors, *sidecars]
        """KV before sidecars: all of Full's, then the other components' anchors, then what stands on them."""
        self._rank = {name: number for number, (_, name) in enumerate(self._order)}

    def check_copies(self, job: Job, moved: Sequence[Moved]) -> None:
        """KV before sidecars, every pool once, and each sealed after it was copied."""
        if not isinstance(job, BackupJob | LoadJob):
            assert not moved, "bytes were copied by a job that copies none"
            return
        expected = [name for component, name in self._order if component in job._parts]
        copied = [pool for what, pool in moved if what != "seal"]
        assert copied == expected, f"pools were copied in the order {copied}, not {expected}"
        if isinstance(job, BackupJob):
            assert [pool for what, pool in moved if what == "seal"] == expected, "a pool was not sealed, or twice"
            assert all((("backup", pool) in moved[: moved.index(("seal", pool))]) for pool in expected), "sealed early"

    def verified(self, job: Job, calls: Sequence[StoreCall]) -> list[StoreCall]:
        """Return the calls of a turn with what came of them: of a fetch, what lies in its slots now."""
        if not isinstance(job, FetchJob):
            return list(calls)
        slot_of = {
            label: slot
            for part in job._parts
            for page, slot in zip(part.pages.tolist(), part.target.tolist(), strict=True)
            for label in self._labels(job._prompt, part.component, page)
        }
        return [
            call._replace(
                answers=tuple(
                    answer if not answer or self._is_sound(label, slot_of[label]) else Answer.FLAWED
                    for label, answer in zip(call.labels, call.answers, strict=bool(call.answers))
                )
            )
            for call in calls
        ]

    def check_calls(
        self, job: Job, calls: Sequence[StoreCall], put_as: PutAs, *, was_stopped: bool, error: CacheError | None
    ) -> None:
        """Look at a job that is over: the objects of its own pages, in every pool, and no others; KV before sidecars.

        It has asked for all of them, unless it was told to stop or has failed.
        """
        if type(job) not in METHOD_OF:
            assert not calls, "a job that names no objects has called the store"
            return
        assert {call.method for call in calls} <= {METHOD_OF[type(job)]}, "a job made calls of another kind"
        asked = [label for call in calls for label in call.labels]
        answers = dict(zip(asked, (answer for call in calls for answer in call.answers), strict=False))
        if isinstance(job, StoreJob) and put_as is PutAs.BARRED:
            assert not asked, "pages were put while the store was cleared"
        elif isinstance(job, StoreJob) and put_as is PutAs.VOID:
            if error is None or Method.REMOVE.value not in str(error):
                assert not any(self._holds(label) for label in asked), "what was put while a store was cleared stays"
            answers = {}
        elif not was_stopped and error is None:
            assert set(asked) == set(self._labels_of(job)), "a job has left objects out"
        self._check_objects(job, asked)
        self._check_outcome(job, answers)

    def _check_objects(self, job: Job, asked: Sequence[Label]) -> None:
        assert len(set(asked)) == len(asked), "one object was asked for twice"
        assert set(asked) <= set(self._labels_of(job)), "an object of another page or pool was asked for"
        if isinstance(job, ProbeJob):
            return
        assert isinstance(job, StoreJob | FetchJob)
        pages = [job._prompt.keys.index(label.key) for label in asked]
        assert pages == sorted(pages), "a page went before its prefix"
        by_key: dict[PageKey, list[int]] = {}
        for label in asked:
            by_key.setdefault(label.key, []).append(self._rank[label.pool])
        for ranks in by_key.values():
            assert all(one < other for one, other in pairwise(ranks)), "a sidecar went before its KV"

    def _check_outcome(self, job: Job, answers: Mapping[Label, Answer]) -> None:
        """A page counts when every pool has it, and only then."""
        if isinstance(job, ProbeJob):
            for component, (pages, present) in enumerate(zip(job._pages, job.present, strict=True)):
                asked = [self._labels(job._prompt, component, page) for page in pages.tolist()]
                found = [bool(answers) and all(answers[label] is Answer.HIT for label in of) for of in asked]
                assert present.tolist() == found, "a look-up misread what the store said"
            return
        assert isinstance(job, StoreJob | FetchJob)
        moved = job.whole
        for part, mask in zip(job._parts, moved, strict=True):
            for page, whole in zip(part.pages.tolist(), mask.tolist(), strict=True):
                labels = self._labels(job._prompt, part.component, page)
                came = bool(answers) and all(bool(answers.get(label)) for label in labels)
                assert whole == came, "a page counts that is not whole, or the reverse"

    def _is_sound(self, label: Label, slot: int) -> bool:
        pool = next(pool for pools in self._pools for pool in pools if pool.name == label.pool)
        return verify_buffers((self._memory.page(pool, slot),), label) is None

    def _labels_of(self, job: Job) -> list[Label]:
        if isinstance(job, ProbeJob):
            return [
                label
                for component, pages in enumerate(job._pages)
                for page in pages.tolist()
                for label in self._labels(job._prompt, component, page)
            ]
        assert isinstance(job, StoreJob | FetchJob)
        parts: Sequence[PageCopies] = job._parts
        return [
            label
            for part in parts
            for page in part.pages.tolist()
            for label in self._labels(job._prompt, part.component, page)
        ]

    def _labels(self, prompt: Prompt, component: int, page: int) -> list[Label]:
        pools: list[PoolSpec] = self._pools[component]
        return [Label(self._owners[pool.name], prompt.keys[page], pool.name) for pool in pools]
