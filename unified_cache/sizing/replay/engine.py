"""Engines of a replay: they fill device pages as a forward pass would, and verify the pages that hits return."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.controller.memory import DevicePool
from unified_cache.core.errors import ConfigError
from unified_cache.core.page import PageKey
from unified_cache.core.pool import ModelLayout, PoolSpec, Slots
from unified_cache.sizing.replay.oracle import Oracle


@dataclass(frozen=True, slots=True)
class OraclePool:
    """One device pool of two layers, as K and V are, whose bytes the oracle knows."""

    pool: DevicePool
    oracle: Oracle

    @classmethod
    def allocate(cls, spec: PoolSpec, pages: int) -> "OraclePool":
        """Allocate device memory for ``pages`` pages and the padding sink."""
        halves = [half for half in (spec.page_bytes - spec.page_bytes // 2, spec.page_bytes // 2) if half]
        try:
            layers = [torch.zeros((pages + 1, half), dtype=torch.uint8) for half in halves]
        except RuntimeError as error:
            raise ConfigError(f"{pages} device pages of {spec.page_bytes} bytes cannot be allocated") from error
        return cls(DevicePool(spec, layers), Oracle(spec))

    def expected(self, keys: Sequence[PageKey]) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Yield for each layer its rows, and the oracle's bytes of the pages of ``keys``."""
        made = self.oracle.payloads(keys)
        start = 0
        for layer in self.pool.layers:
            rows: npt.NDArray[np.uint8] = layer.numpy()
            yield rows, made[:, start : start + rows.shape[1]]
            start += rows.shape[1]


class OracleEngine:
    """An engine that writes the oracle's bytes into every pool of a layout that has bytes, and compares with them."""

    __slots__ = ("_components",)

    def __init__(self, components: Sequence[Sequence[OraclePool]]) -> None:
        self._components = components

    @classmethod
    def allocate(cls, layout: ModelLayout, pages: Sequence[int]) -> "OracleEngine":
        """Allocate ``pages[component]`` pages, and the padding sink, in each pool of each component."""
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
            for rows, made in pool.expected(keys):
                rows[slots] = made

    def count_wrong(self, component: int, keys: Sequence[PageKey], slots: Slots) -> int:
        """Count the device pages of a component that hold other bytes than their keys demand, in any pool."""
        wrong = np.zeros(len(keys), np.bool_)
        for pool in self._components[component]:
            for rows, made in pool.expected(keys):
                wrong |= (rows[slots] != made).any(axis=1)
        return int(np.count_nonzero(wrong))
