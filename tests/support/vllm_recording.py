"""Calls of a real vLLM to its tier, played to the tier without vLLM: see ``tests.engines.vllm.recorded``.

What the engine's host memory holds is made up from the names of chunks: a row that is stored is filled with the bytes
of its chunk first, and a row that was loaded must hold them afterwards.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

from tests.support.vllm_tier import HostMemory
from unified_cache.integrations.vllm.chunks import ChunkTier
from unified_cache.integrations.vllm.moving import JobEnd
from unified_cache.integrations.vllm.names import GroupFacts, RowShape, VllmFacts
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Answer

TIMEOUT_S = 30.0

ANSWERS = {"hit": Answer.HIT, "miss": Answer.MISS, "later": Answer.UNAVAILABLE}
"""By their words in a recording."""

DIRECTORY = Path(__file__).resolve().parent.parent / "fixtures" / "vllm"


def recordings() -> list[Path]:
    """Return every recording."""
    return sorted(DIRECTORY.glob("*.txt"))


@dataclass
class PlayedJob:
    """A job of the recording: its chunks by key and row, and what the engine was told of them."""

    keys: list[bytes]
    rows: list[int]
    end: JobEnd | None = None


class RecordedEngine:
    """An engine that makes the calls of a recording."""

    def __init__(self, tier: ChunkTier, memory: HostMemory) -> None:
        self.tier = tier
        self._memory = memory
        self._jobs: dict[int, PlayedJob] = {}
        self.loaded_count = 0
        self.hits_count = 0

    @classmethod
    def open(cls, lines: Iterator[list[str]], settings: TierSettings) -> "RecordedEngine":
        """Open a tier for the engine that the first lines describe."""
        _, rows, payload_bytes = next(lines)
        row = RowShape(-(-int(payload_bytes) // PAGESIZE) * PAGESIZE, int(payload_bytes))
        groups: list[GroupFacts] = []
        for words in lines:
            if words == ["start"]:
                break
            groups.append(GroupFacts(int(words[1]), int(words[2]), int(words[3]), "recorded"))
        memory = HostMemory(int(rows), row)
        facts = VllmFacts("recorded", "1", "float32", tuple(groups), {})
        return cls(ChunkTier.open(settings, facts, memory.view, row), memory)

    def play(self, lines: Iterator[list[str]]) -> None:
        """Make every call of a recording, and compare every answer that does not depend on the time."""
        for word, *rest in lines:
            match word:
                case "look":
                    self._look(_key(rest[0]), rest[1], ANSWERS[rest[2]])
                case "store":
                    self._store(int(rest[0]), rest[1:])
                case "load":
                    self._load(int(rest[0]), rest[1:])
                case "ended":
                    self._ended(int(rest[0]), rest[1] == "whole", [_key(word) for word in rest[2:]])
                case "touch":
                    self.tier.touch([_key(word) for word in rest])
                case "over":
                    self.tier.request_ended(rest[0])
                case "step":
                    self.tier.step_ended()
                case "drain":
                    self.tier.drain()
                case "new" | "shutdown":
                    pass
                case _:
                    raise AssertionError(f"the recording says {word}")

    def close(self) -> None:
        """Shut the tier down and unmap the host memory; BufferError if a view of it is left."""
        assert self.tier.close()
        self._memory.close()

    def _look(self, key: bytes, request: str, recorded: Answer) -> None:
        answer = self.tier.look_up(key, request)
        if recorded is Answer.UNAVAILABLE:
            return
        if answer is Answer.UNAVAILABLE:
            self.tier.wait(TIMEOUT_S)
            answer = self.tier.look_up(key, request)
        assert answer is recorded
        self.hits_count += answer is Answer.HIT

    def _store(self, number: int, words: Sequence[str]) -> None:
        job = self._begin(number, words)
        ends = {key: int(word.split(":")[2]) for key, word in zip(job.keys, words, strict=True)}
        for key, row in zip(job.keys, job.rows, strict=True):
            self._memory.fill(row, key)
        self.tier.store(number, job.keys, job.rows, ends.get)

    def _load(self, number: int, words: Sequence[str]) -> None:
        job = self._begin(number, words)
        self.tier.load(number, job.keys, job.rows)

    def _begin(self, number: int, words: Sequence[str]) -> PlayedJob:
        """Return a job of chunks, each said as ``KEY:ROW`` and what follows."""
        chunks = [word.split(":") for word in words]
        job = PlayedJob([_key(chunk[0]) for chunk in chunks], [int(chunk[1]) for chunk in chunks])
        self._jobs[number] = job
        return job

    def _ended(self, number: int, is_whole: bool, came: Sequence[bytes]) -> None:
        """Wait for a job, which ended here in the engine, and see that it ended alike."""
        if self._jobs[number].end is None:
            assert self.tier.wait(TIMEOUT_S)
            for end in self.tier.ended():
                self._jobs[end.job.number].end = end
        job = self._jobs.pop(number)
        assert job.end is not None
        assert (not job.end.failed) is is_whole
        if not is_whole:
            assert set(job.end.moved) >= set(came)
        if job.end.job.is_load:
            moved = set(job.end.moved)
            for key, row in zip(job.keys, job.rows, strict=True):
                if key in moved:
                    assert self._memory.row(row) == self._memory.payload(key)
                    self.loaded_count += 1


def _key(word: str) -> bytes:
    """Return a key of the number and the group that the recording says."""
    number, _, group = word.partition("g")
    return hashlib.sha256(number.encode()).digest() + int(group).to_bytes(4, "big")
