"""Engines of a replay: they fill device pages as a forward pass would, and verify the pages that hits return."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.errors import ConfigError
from unified_cache.memory import DevicePool
from unified_cache.page import PageKey
from unified_cache.pool import ModelLayout, PoolSpec, Slots
from unified_cache.replay.oracle import Oracle

__all__ = ["OracleEngine"]


class OraclePool:
    """One device pool of two layers, as K and V are, whose bytes the oracle knows."""

    __slots__ = ("_oracle", "_rows", "pool")

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self._oracle = Oracle(pool.spec)
        self._rows: list[npt.NDArray[np.uint8]] = [layer.numpy() for layer in pool.layers]

    @classmethod
    def allocate(cls, spec: PoolSpec, pages: int) -> "OraclePool":
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

    def fill(self, keys: Sequence[PageKey], slots: Slots) -> None:
        """Write the oracle's bytes, each layer its part."""
        made = self._oracle.payloads(keys)
        start = 0
        for rows in self._rows:
            end = start + rows.shape[1]
            rows[slots] = made[:, start:end]
            start = end

    def wrong(self, keys: Sequence[PageKey], slots: Slots) -> npt.NDArray[np.bool_]:
        """Tell for each page whether any byte differs from the oracle's."""
        expected = self._oracle.payloads(keys)
        wrong = np.zeros(len(keys), np.bool_)
        start = 0
        for rows in self._rows:
            end = start + rows.shape[1]
            wrong |= (rows[slots] != expected[:, start:end]).any(axis=1)
            start = end
        return wrong


class OracleEngine:
    """An engine that writes the oracle's bytes into every pool of a layout that has bytes, and compares with them."""

    __slots__ = ("_components",)

    def __init__(self, components: Sequence[Sequence[OraclePool]]) -> None:
        self._components = components

    @classmethod
    def allocate(cls, layout: ModelLayout, pages: Sequence[int]) -> "OracleEngine":
        """Allocate ``pages[component]`` pages, and the padding sink, in each pool of each component.

        Raises:
            ConfigError: they do not fit.

        """
        sizes = zip(layout.components, pages, strict=True)
        return cls(
            [
                [OraclePool.allocate(spec, count) for spec in component.pools if spec.page_bytes]
                for component, count in sizes
            ]
        )

    @property
    def pools(self) -> list[DevicePool]:
        """The device pools, as the cache takes them."""
        return [pool.pool for component in self._components for pool in component]

    def compute(self, component: int, keys: Sequence[PageKey], slots: Slots) -> None:
        """Fill device pages of a component with the bytes that their keys demand, in every pool."""
        for pool in self._components[component]:
            pool.fill(keys, slots)

    def count_wrong(self, component: int, keys: Sequence[PageKey], slots: Slots) -> int:
        """Count the device pages of a component that hold other bytes than their keys demand, in any pool."""
        wrong = np.zeros(len(keys), np.bool_)
        for pool in self._components[component]:
            wrong |= pool.wrong(keys, slots)
        return int(np.count_nonzero(wrong))
