"""Batches sent last, for consumers that have missed some: bounded by number and by bytes."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

__all__ = ["ReplayBuffer"]


class ReplayBuffer:
    """Batches with neighbouring sequence numbers, the oldest first. Not thread-safe."""

    __slots__ = ("_batches", "_batches_max", "_bytes_count", "_bytes_max", "_first_seq")

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._batches: deque[bytes] = deque()
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._bytes_count = 0
        self._first_seq = 0

    @property
    def first_seq(self) -> int:
        """Sequence number of the oldest batch kept, or of the next one if there is none."""
        return self._first_seq

    def append(self, payload: bytes) -> None:
        """Keep the next batch; forget the oldest ones beyond the bounds, the new one itself included."""
        self._batches.append(payload)
        self._bytes_count += len(payload)
        while len(self._batches) > self._batches_max or self._bytes_count > self._bytes_max:
            self._bytes_count -= len(self._batches.popleft())
            self._first_seq += 1

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """Yield sequence number and batch of those kept from ``seq`` on."""
        start = min(max(seq - self._first_seq, 0), len(self._batches))
        yield from enumerate(islice(self._batches, start, None), self._first_seq + start)
