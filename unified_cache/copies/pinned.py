"""Host memory that a GPU reads and writes where it lies."""

import mmap
import weakref
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["PinnedBytes"]

REGISTERED_BYTES_MAX = 64 << 30
"""Bytes of one registration: drivers from R580 on refuse hundreds of GiB in one call."""

PORTABLE = 1
"""Pinned for every CUDA context (cudaHostRegisterPortable)."""


class PinnedBytes:
    """Zeros that take their own size, in whole pages of the system, and go back to it when closed.

    torch's pinned memory is rounded up to a power of two, and kept for good. A forked child has none of it: a page that
    either process copied by writing to it would have moved away from where the GPU knows it.
    """

    __slots__ = ("__weakref__", "_registered", "_runtime", "_unregister", "bytes")

    def __init__(self, memory: npt.NDArray[np.uint8], runtime: ModuleType) -> None:
        """Take memory that nothing of is registered yet."""
        self.bytes = memory
        self._runtime = runtime
        self._registered: list[int] = []
        """Addresses of the parts that are registered."""
        # Also where nobody closes it: memory must not go back to the system while CUDA knows it.
        self._unregister = weakref.finalize(self, _unregister, memory, runtime, self._registered)

    @classmethod
    def allocate(cls, size: int) -> "PinnedBytes":
        """Map ``size`` bytes and register them with CUDA.

        Raises:
            OSError: the system or the driver has not that much.
        """
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_DONTFORK)
        runtime: ModuleType = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch says no types
        pinned = cls(np.frombuffer(mapped, np.uint8), runtime)
        for start in range(0, size, REGISTERED_BYTES_MAX):
            pinned.register(start, min(start + REGISTERED_BYTES_MAX, size))
        return pinned

    def register(self, start: int, end: int) -> None:
        """Register bytes [start, end); after an error nothing is registered any more."""
        address = self.bytes.ctypes.data + start
        error = int(self._runtime.cudaHostRegister(address, end - start, PORTABLE))
        if error:
            self.close()
            raise OSError(f"cudaHostRegister of {end - start} bytes failed with CUDA error {error}")
        self._registered.append(address)

    def close(self) -> None:
        """End the registrations; the GPU must not use the memory any more. A second time does nothing."""
        self._unregister()


def _unregister(memory: npt.NDArray[np.uint8], runtime: ModuleType, registered: list[int]) -> None:
    """End registrations while the memory, which the first argument keeps, is still there."""
    while registered:
        runtime.cudaHostUnregister(registered.pop())
