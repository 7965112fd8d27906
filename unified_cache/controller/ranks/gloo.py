"""Ranks that are processes, over ``torch.distributed`` and gloo."""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import ConfigError, InputError, RankLostError
from unified_cache.core.extras import needs_extra
from unified_cache.core.pool import Pages

with needs_extra("engine", "unified_cache.controller.ranks.gloo"):
    import torch
    import torch.distributed as dist

FRAME_BYTES = 1024
"""Bytes of the first message of every call: 8,128 bits, enough for most calls."""

BITS_MAX = 1 << 24
"""Longest array that is agreed on: 2 MiB on the wire."""

_LENGTH_BYTES = 4


class TorchRanks:
    """A process group used for nothing else, whose timeout is the deadline of every call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Use ``group``, of the gloo backend; ``open`` makes one."""
        self._group = group
        self._reason = ""
        """Why the group is lost; empty while it is not."""

    @classmethod
    def open(cls, timeout_s: float, groups: Sequence[Sequence[int]] | None = None) -> "TorchRanks":
        """Cut the processes of the default process group into groups, by default one of all; return this process's.

        Every process calls it with the same groups, also those that are in none.

        Raises:
            ConfigError: this process is in none of them.
        """
        chosen = [list(range(dist.get_world_size()))] if groups is None else [list(ranks) for ranks in groups]
        timeout = timedelta(seconds=timeout_s)
        group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]  # torch has no types here
            chosen, timeout=timeout, backend="gloo"
        )
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"process {dist.get_rank()} is in none of the groups {chosen}")
        return cls(group)

    @property
    def rank(self) -> int:
        """Number of this rank, in [0, size)."""
        return self._group.rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return self._group.size()

    @property
    def is_lost(self) -> bool:
        """True after a rank was lost: nothing can be agreed on any more."""
        return bool(self._reason)

    def agree(self, bits: Pages) -> Pages:
        """Return what is True on every rank: one all-reduce, or two for long arrays.

        The first is as long on every rank, and names the array's length: so all find out a rank that is out of step.

        Raises:
            RankLostError: a rank died, does not answer in time, or asked about an array of another length.
            InputError: more than ``BITS_MAX`` bits; nothing was sent.
        """
        if len(bits) > BITS_MAX:
            raise InputError(f"at most {BITS_MAX} bits can be agreed on, found {len(bits)}")
        if self._reason:
            raise RankLostError(self._reason)
        packed = np.packbits(bits)
        length = np.frombuffer(len(bits).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        frame = np.zeros(FRAME_BYTES, np.uint8)
        head_bytes = 2 * _LENGTH_BYTES
        frame[:_LENGTH_BYTES], frame[_LENGTH_BYTES:head_bytes] = length, ~length
        first = packed[: FRAME_BYTES - head_bytes]
        frame[head_bytes : head_bytes + len(first)] = first
        self._reduce(frame)
        # A bit in which lengths differ survives neither as it is nor inverted.
        if not (frame[:_LENGTH_BYTES] ^ frame[_LENGTH_BYTES:head_bytes] == 0xFF).all():
            self._lose(f"ranks are out of step: rank {self.rank} asked about {len(bits)} bits, another about others")
        first[:] = frame[head_bytes : head_bytes + len(first)]
        if len(first) < len(packed):
            self._reduce(packed[len(first) :])
        return np.unpackbits(packed, count=len(bits)).astype(np.bool_)

    def _reduce(self, bytes_: npt.NDArray[np.uint8]) -> None:
        try:
            dist.all_reduce(torch.from_numpy(bytes_), dist.ReduceOp.BAND, group=self._group)
        except RuntimeError as error:  # what gloo raises for a peer that is gone and for one that is late
            self._lose(f"rank {self.rank} of {self.size} lost the others: {error}", error)

    def _lose(self, reason: str, cause: Exception | None = None) -> None:
        self._reason = reason
        raise RankLostError(reason) from cause
