"""Mistakes of order between a device's streams, its pinned memory and the host."""

from scripts.mutants.mutant import Mutant

__all__ = ["DEVICE_MUTANTS"]

COPIES = ("tests/unit/core/test_device_copies.py",)

DEVICE_MUTANTS = [
    Mutant(
        "a buffer is put away before the device has filled it",
        "memory.py",
        "        self._used[number].synchronize()\n        _copy(staged,",
        "        _copy(staged,",
        COPIES,
    ),
    Mutant(
        "a buffer is filled again before its copy has ended",
        "memory.py",
        "            self._used[self._turn].synchronize()\n",
        "",
        COPIES,
    ),
    Mutant(
        "the end of a piece to the device is not recorded",
        "memory.py",
        "staged.to(self._device, non_blocking=True))\n            self._used[number].record()\n",
        "staged.to(self._device, non_blocking=True))\n",
        COPIES,
    ),
    Mutant(
        "the end of a piece from the device is not recorded",
        "memory.py",
        "non_blocking=True)\n            self._used[number].record()\n            moving",
        "non_blocking=True)\n            moving",
        COPIES,
    ),
    Mutant(
        "a piece from the device is recorded before its copy",
        "memory.py",
        "            staged.copy_(source.index_select(0, gather[first:last]), non_blocking=True)\n"
        "            self._used[number].record()\n",
        "            self._used[number].record()\n"
        "            staged.copy_(source.index_select(0, gather[first:last]), non_blocking=True)\n",
        COPIES,
    ),
    Mutant(
        "copies do not come after the engine's stream",
        "memory.py",
        "            self._stream.wait_event(before)\n",
        "",
        COPIES,
    ),
    Mutant(
        "copies are left before they have ended",
        "memory.py",
        "                self._stream.synchronize()",
        "                pass",
        COPIES,
    ),
    Mutant(
        "the end of a layer is recorded on no copy",
        "memory.py",
        "        copied.record()\n",
        "",
        COPIES,
    ),
]
