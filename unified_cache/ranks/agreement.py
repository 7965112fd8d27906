"""Checks built on ``RankGroup.agree``: ranks have the same configuration, and succeed or fail together."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from unified_cache.config import CacheConfig
from unified_cache.errors import CacheError, ConfigError, RankError
from unified_cache.pool import ModelLayout
from unified_cache.ranks.group import RankGroup

__all__ = ["check_alike", "check_configuration", "failed_ranks", "together"]


def check_alike(ranks: RankGroup, what: str, value: str) -> None:
    """Refuse, on every rank, a value that is not the same on all of them.

    Raises:
        ConfigError: it is not.
    """
    digest = np.unpackbits(np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)).astype(np.bool_)
    # A bit on which ranks differ survives neither as it is nor inverted.
    ones, zeros = np.split(ranks.agree(np.concatenate([digest, ~digest])), 2)
    if not (ones | zeros).all():
        raise ConfigError(f"{what} must be the same on all {ranks.size} ranks, found on rank {ranks.rank}: {value}")


def check_configuration(ranks: RankGroup, layout: ModelLayout, config: CacheConfig, *, has_storage: bool) -> None:
    """Refuse, on every rank, caches whose configurations differ.

    Raises:
        ConfigError: they are of different shapes, or something depends on a rank's own clock.
    """
    shape = [(component.name, component.span) for component in layout.components]
    check_alike(ranks, "the configuration", f"{layout.page_size} {shape} {config} {has_storage}")
    if ranks.size > 1 and config.eviction.ttl_s is not None:
        raise ConfigError(f"clocks differ between ranks: expected no ttl_s, found {config.eviction.ttl_s}")


def failed_ranks(ranks: RankGroup, failed: list[bool]) -> list[list[int]]:
    """Return on every rank, for each of several steps, the ranks on which it failed; ``failed`` is this rank's part."""
    well = np.ones((len(failed), ranks.size), np.bool_)
    well[failed, ranks.rank] = False
    agreed = ranks.agree(well.reshape(-1)).reshape(well.shape)
    return [np.flatnonzero(~row).tolist() for row in agreed]


@contextmanager
def together(ranks: RankGroup, what: str) -> Iterator[None]:
    """Fail a ``with`` block on every rank if it fails on one: there with its own error, elsewhere with RankError.

    Raises:
        RankError: it failed, but not here.
    """
    try:
        yield
    except CacheError:
        failed_ranks(ranks, [True])
        raise
    (found,) = failed_ranks(ranks, [False])
    if found:
        raise RankError(f"{what} failed on ranks {found}")
