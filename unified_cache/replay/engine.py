"""The engine's side of a replay: fills device pages as a forward pass would, and checks those handed back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.errors import ConfigError
from unified_cache.memory import DevicePool
from unified_cache.page import PageKey
from unified_cache.pool import PoolSpec, Slots
from unified_cache.replay.oracle import Oracle

__all__ = ["Engine", "NoEngine", "OracleEngine"]


class Engine(Protocol):
    """Who computes pages and who would notice wrong ones."""

    def compute(self, keys: Sequence[PageKey], slots: Slots) -> None:
        """Fill device pages with what belongs there."""
        ...

    def count_wrong(self, keys: Sequence[PageKey], slots: Slots) -> int:
        """Count the device pages that hold anything else than what belongs there."""
        ...

    @property
    def verifies(self) -> bool:
        """Whether ``count_wrong`` looks at bytes at all."""
        ...


class OracleEngine:
    """One pool, K and V as a layer each, whose bytes the oracle knows."""

    __slots__ = ("_oracle", "_rows", "pool")

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self._oracle = Oracle(pool.spec)
        self._rows: list[npt.NDArray[np.uint8]] = [layer.numpy() for layer in pool.layers]

    @classmethod
    def allocate(cls, spec: PoolSpec, pages: int) -> "OracleEngine":
        """Allocate device memory for ``pages`` pages and the padding sink.

        Raises:
            ConfigError: it does not fit.

        """
        halves = [half for half in (spec.page_bytes - spec.page_bytes // 2, spec.page_bytes // 2) if half]
        try:
            layers = [torch.zeros((pages + 1, half), dtype=torch.uint8) for half in halves]
        except RuntimeError as error:
            raise ConfigError(f"{pages} device pages of {spec.page_bytes} bytes cannot be allocated") from error
        return cls(DevicePool(spec, layers))

    @property
    def verifies(self) -> bool:
        """True: every byte."""
        return True

    def compute(self, keys: Sequence[PageKey], slots: Slots) -> None:
        """Write what the oracle says, each layer its part."""
        made = self._oracle.payloads(keys)
        start = 0
        for rows in self._rows:
            end = start + rows.shape[1]
            rows[slots] = made[:, start:end]
            start = end

    def count_wrong(self, keys: Sequence[PageKey], slots: Slots) -> int:
        """Compare every byte with the oracle."""
        expected = self._oracle.payloads(keys)
        wrong = np.zeros(len(keys), np.bool_)
        start = 0
        for rows in self._rows:
            end = start + rows.shape[1]
            wrong |= (rows[slots] != expected[:, start:end]).any(axis=1)
            start = end
        return int(np.count_nonzero(wrong))


class NoEngine:
    """The twin of ``OracleEngine`` that computes nothing and looks at nothing."""

    __slots__ = ()

    @property
    def verifies(self) -> bool:
        """False: there are no bytes."""
        return False

    def compute(self, keys: Sequence[PageKey], slots: Slots) -> None:
        """Compute nothing."""

    def count_wrong(self, keys: Sequence[PageKey], slots: Slots) -> int:
        """Find nothing wrong."""
        return 0
