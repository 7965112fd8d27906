"""Calls of the engine to the tier, recorded as text for tests without an engine: see ``tests.support.vllm_recording``.

Runs where vLLM is installed. Keys, requests and jobs are numbered in the order they come in.
"""

# pyright: reportMissingImports=false
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import IO

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from unified_cache.integrations.vllm.tier import UnifiedCacheTier

RECORD_VARIABLE = "UNIFIED_CACHE_VLLM_RECORD"
"""File to record into."""

WORDS = {LookupResult.HIT: "hit", LookupResult.MISS: "miss", LookupResult.RETRY: "later"}


class RecordedTier(UnifiedCacheTier):
    """The tier as it is, with a line for each call."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # passed on as vLLM passes them
        self._file: IO[str] = Path(os.environ[RECORD_VARIABLE]).open("w")  # noqa: SIM115  # until shut-down
        self._step: list[str] = []
        self._step_before: list[str] = []
        self._keys: dict[bytes, int] = {}
        self._requests: dict[str, int] = {}
        names = self.chunks.names
        rows, _ = self._primary_kv_view.shape
        self._line("rows", str(rows), str(names.layout.pools[0].page_bytes))
        for component in names.layout.components:
            self._line("group", component.name[1:], str(component.page_size), str(component.span))
        self._line("start")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Record the answer, too."""
        result = super().lookup(key, req_context)
        self._line("look", self._key(key), self._request(req_context), WORDS[result])
        return result

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Record where each chunk ends, too."""
        end_of = job_metadata.req_context.get_offload_key_position
        chunks = [
            f"{self._key(key)}:{row}:{end_of(key)}"
            for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        ]
        self._line("store", str(job_metadata.job_id), *chunks)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Record."""
        chunks = [f"{self._key(key)}:{row}" for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)]
        self._line("load", str(job_metadata.job_id), *chunks)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Record the outcome of jobs that ended."""
        results = list(super().get_finished_jobs())
        for result in results:
            came = [self._key(key) for key in result.successful_keys or ()]
            self._line("ended", str(result.job_id), "whole" if result.success else "part", *came)
        return results

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Record."""
        self._line("touch", *(self._key(key) for key in keys))
        super().touch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Record."""
        self._line("new", self._request(req_context))
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Record."""
        self._line("over", self._request(req_context))
        super().on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Record; a step in which the engine asked what it asked in the one before is recorded once."""
        super().on_schedule_end(context)
        if self._step != self._step_before:
            self._file.write("".join([*self._step, "step\n"]))
        self._step_before, self._step = self._step, []

    def drain_jobs(self) -> None:
        """Record."""
        self._line("drain")
        super().drain_jobs()

    def shutdown(self) -> None:
        """Record, and close the file."""
        self._line("shutdown")
        self._file.write("".join(self._step))
        self._file.close()
        super().shutdown()

    def _line(self, *words: str) -> None:
        self._step.append(" ".join(words) + "\n")

    def _key(self, key: bytes) -> str:
        """Return the number of a hash, and its group."""
        return f"{self._keys.setdefault(key[:-4], len(self._keys))}g{int.from_bytes(key[-4:], 'big')}"

    def _request(self, context: ReqContext) -> str:
        return f"r{self._requests.setdefault(context.req_id, len(self._requests))}"
