"""Several ranks that decide alike: a group agrees on arrays of bits, and all checks are built on that."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np

from unified_cache.core.config import CacheConfig
from unified_cache.core.errors import CacheError, ConfigError, RankError, check_kind
from unified_cache.core.pool import Identity, ModelLayout, Pages


class RankGroup(Protocol):
    """Ranks that make the same calls in the same order, as tensor-parallel schedulers do.

    # Behavior

    * what is agreed on is the same on every rank
    * arrays of different lengths are an error on every rank, and no rank waits for ever
    * a rank that does not answer in time is an error on every other rank
    * after such an error the group is lost: every later call is an error at once
    """

    @property
    def rank(self) -> int:
        """Number of this rank, in [0, size)."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def is_lost(self) -> bool:
        """True after a rank was lost: nothing can be agreed on any more."""
        ...

    def agree(self, bits: Pages) -> Pages:
        """Return what is True on every rank, shape as ``bits``; a new array or the same. Waits for the others.

        Raises:
            RankLostError: a rank does not answer, or asks something else.
        """
        ...


class LocalRanks:
    """A group of one."""

    __slots__ = ()

    rank = 0
    size = 1
    is_lost = False

    def agree(self, bits: Pages) -> Pages:
        """Return what this rank says."""
        return bits


Held = TypeVar("Held")

DIGEST_BYTES = 32

COUNT_BYTES = 4
"""Length of the number that says how many digests follow."""


def check_alike(ranks: RankGroup, what: str, value: str) -> None:
    """Raise ConfigError on every rank for a value that is not the same on all of them."""
    digest = np.unpackbits(np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)).astype(np.bool_)
    # A bit on which ranks differ survives neither as it is nor inverted.
    ones, zeros = np.split(ranks.agree(np.concatenate([digest, ~digest])), 2)
    if not (ones | zeros).all():
        raise ConfigError(f"{what} must be the same on all {ranks.size} ranks, found on rank {ranks.rank}: {value}")


def check_configuration(
    ranks: RankGroup, layout: ModelLayout, config: CacheConfig, identity: Identity, *, has_storage: bool
) -> None:
    """Refuse, on every rank, caches whose configurations differ, or do not fit one rank's shard.

    Raises:
        ConfigError: they are of different shapes, or something depends on a rank's own clock.
        LayoutError: a rank's pools cannot be those of its shard, or its layout is one of stored pages alone; RankError
            on the others.
    """
    with together(ranks, "naming what a rank stores"):
        check_kind(identity, Identity, 'an Identity, such as Identity("my-model")', ConfigError)
        layout.check_resumable()
        identity.owners(layout)
    shape = [(component.name, component.span) for component in layout.components]
    check_alike(ranks, "the configuration", f"{layout.page_size} {shape} {config} {has_storage}")


def failed_ranks(ranks: RankGroup, failed: list[bool]) -> list[list[int]]:
    """Return on every rank, for each of several steps, the ranks on which it failed; ``failed`` is this rank's part."""
    well = np.ones((len(failed), ranks.size), np.bool_)
    well[failed, ranks.rank] = False
    agreed = ranks.agree(well.reshape(-1)).reshape(well.shape)
    return [np.flatnonzero(~row).tolist() for row in agreed]


def pools_to_store(ranks: RankGroup, identity: Identity, layout: ModelLayout) -> frozenset[str]:
    """Return the names of the pools that this rank stores: of those with one owner, the first rank's.

    Raises:
        ConfigError: two ranks have the same shard, on every rank.
    """
    owners = identity.owners(layout)
    shard = hashlib.sha256(identity.shard.rank_text.encode()).digest()
    by_rank = _gather(ranks, [shard, *sorted(set(owners.values()))])
    holders: dict[bytes, list[int]] = {}
    for rank, (other, *_) in enumerate(by_rank):
        holders.setdefault(other, []).append(rank)
    alike = [same for same in holders.values() if len(same) > 1]
    if alike:
        raise ConfigError(
            f"each rank of a group must name the part of the model that it alone holds, Identity(shard=Shard.of_rank("
            f"...)), found ranks {alike} with one name; rank {ranks.rank} has {identity.shard.rank_text!r}"
        )
    stored = {owner for other in by_rank[: ranks.rank] for owner in other[1:]}
    return frozenset(pool for pool, owner in owners.items() if owner not in stored)


def _gather(ranks: RankGroup, digests: Sequence[bytes]) -> list[list[bytes]]:
    """Return by rank the digests that each rank names; any number of them."""
    counts = [int.from_bytes(row) for row in _gather_rows(ranks, len(digests).to_bytes(COUNT_BYTES))]
    rows = _gather_rows(ranks, b"".join(digests).ljust(max(counts) * DIGEST_BYTES, b"\0"))
    return [
        [row[start : start + DIGEST_BYTES] for start in range(0, count * DIGEST_BYTES, DIGEST_BYTES)]
        for row, count in zip(rows, counts, strict=True)
    ]


def _gather_rows(ranks: RankGroup, row: bytes) -> list[bytes]:
    """Return by rank the bytes that each rank names, equally many on all of them."""
    bits = np.ones((ranks.size, 8 * len(row)), np.bool_)
    bits[ranks.rank] = np.unpackbits(np.frombuffer(row, np.uint8))
    agreed = ranks.agree(bits.reshape(-1)).reshape(bits.shape)
    return [np.packbits(each).tobytes() for each in agreed]


def held_by_all(ranks: RankGroup, held: Held | None) -> Held | None:
    """Return ``held`` if every rank could allocate it, else None; the caller gives it back in either case."""
    return held if ranks.agree(np.array([held is not None]))[0] else None


def true_for_all(ranks: RankGroup, masks: Sequence[Pages]) -> list[Pages]:
    """Return where masks, of the same lengths on every rank, are True on all of them."""
    if not masks:
        return []
    if len(masks) == 1:
        return [ranks.agree(masks[0])]
    return np.split(ranks.agree(np.concatenate(masks)), np.cumsum([len(mask) for mask in masks])[:-1])


@contextmanager
def together(ranks: RankGroup, what: str) -> Iterator[None]:
    """Fail a ``with`` block on every rank if it fails on one: there with its own error, elsewhere with RankError."""
    try:
        yield
    except CacheError:
        failed_ranks(ranks, [True])
        raise
    (found,) = failed_ranks(ranks, [False])
    if found:
        raise RankError(f"{what} failed on ranks {found}")
