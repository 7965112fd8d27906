"""Layer-wise loads: an engine computes on the first layers of a load while the last are still on their way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from types import TracebackType

from unified_cache.controller.operation import Operation
from unified_cache.errors import CopyError, InputError, WaitTimeoutError
from unified_cache.memory import Copied
from unified_cache.pool import PageCopies, Slots

__all__ = ["LayerProgress", "LayerwiseLoad"]

Layer = tuple[str, int]
"""Pool and number of a layer in it."""


class LayerProgress:
    """Progress of a worker through the layers of a load; any thread may ask.

    The worker copies inside of ``with progress:``, so that nobody waits for a load that has failed.
    """

    __slots__ = ("_changed", "_copied", "_ended", "_error", "_layers_counts", "_place")

    def __init__(self, layers_counts: Mapping[str, int], order: Sequence[Layer]) -> None:
        """Expect the layers of ``order`` one after the other; ``layers_counts`` has every pool of the model."""
        self._layers_counts = layers_counts
        self._place = {layer: number for number, layer in enumerate(order)}
        self._copied: list[Copied] = []
        """Of the layers that come first in the order: where their copies end."""
        self._ended = False
        self._error: BaseException | None = None
        self._changed = Condition(Lock())

    def __enter__(self) -> "LayerProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def note(self, copied: Copied) -> None:
        """Say where the copy of the next layer ends."""
        with self._changed:
            self._copied.append(copied)
            self._changed.notify_all()

    def has(self, pool: str, layer: int) -> bool:
        """Tell whether ``wait`` would return at once."""
        place = self._find(pool, layer)
        with self._changed:
            return place < len(self._copied)

    def wait(self, pool: str, layer: int, timeout_s: float) -> None:
        """See ``LayerwiseLoad.wait``."""
        place = self._find(pool, layer)
        if place < 0:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._ended or place < len(self._copied), timeout_s)
            if place >= len(self._copied):
                if self._ended:
                    raise CopyError(f"layer {layer} of {pool} was not loaded: {self._error}") from self._error
                raise WaitTimeoutError(f"layer {layer} of {pool} has not arrived after {timeout_s} s")
            copied = self._copied[place]
        copied.wait()

    def _find(self, pool: str, layer: int) -> int:
        """Return the place of a layer in the order; -1 if nothing of it had to be brought."""
        count = self._layers_counts.get(pool, 0)
        if not 0 <= layer < count:
            raise InputError(f"expected a layer of {dict(self._layers_counts)}, found layer {layer} of {pool}")
        return self._place.get((pool, layer), -1)


@dataclass(frozen=True, slots=True, eq=False)
class LayerwiseLoad:
    """The pages of a load, lent to an engine that computes on them before they are in the tree.

    From ``begin_layerwise`` to ``end_layerwise`` the load keeps all its slots and pins, whatever becomes of it: done,
    failed, cancelled or late, nothing is published and nothing given back before ``end_layerwise``. So the slots stay
    the load's, and hold the pages as far as ``wait`` has said so; the engine reads them and never writes. When the load
    has failed, ``poll`` tells at once: what was computed from then on is worth nothing.
    """

    operation: Operation
    end: int
    """Pages of the prompt that can be resumed from once all layers are there."""
    slots: tuple[Slots, ...]
    """By component: device slots of pages [window(end), end), on their way or there before. The engine's own arrays.

    The page map does not lead to what is on its way: where a component is mapped, take its slots from here.
    """
    parts: tuple[PageCopies, ...]
    """What of it is on its way."""
    progress: LayerProgress

    def arrived(self, pool: str, layer: int) -> bool:
        """Tell whether ``wait`` would return at once; ``layer`` is the pool's own number of its tensor.

        Raises:
            InputError: the pool has no such layer.
        """
        return self.progress.has(pool, layer)

    def wait(self, pool: str, layer: int, timeout_s: float) -> None:
        """Wait until a layer of the pages is there; from any thread.

        On a GPU it waits until the copy is under way, and has what this thread gives its stream from now on come
        after it.

        Raises:
            InputError: the pool has no such layer.
            CopyError: the load has failed before it came to that layer.
            SettleTimeoutError: it has not come to it within ``timeout_s``.
        """
        self.progress.wait(pool, layer, timeout_s)
