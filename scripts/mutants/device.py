"""Mistakes of order between a device's streams, its pinned memory and the host."""

from scripts.mutants.mutant import Mutant

COPIES = ("tests/unit/core/test_device_copies.py",)
STALENESS = ("tests/e2e/test_engine_staleness.py",)

DEVICE_MUTANTS = [
    Mutant(
        "a buffer is put away before the device has filled it",
        "controller/copies/gpu.py",
        "        self._used[number].synchronize()\n        copy_rows(staged,",
        "        copy_rows(staged,",
        COPIES,
    ),
    Mutant(
        "a buffer is filled again before its copy has ended",
        "controller/copies/gpu.py",
        "            self._used[number].synchronize()\n            staged,",
        "            staged,",
        COPIES,
    ),
    Mutant(
        "the end of a piece to the device is not recorded",
        "controller/copies/gpu.py",
        "            self._used[number] = event_on(self._stream)\n            layer_rows",
        "            layer_rows",
        COPIES,
    ),
    Mutant(
        "the end of a piece from the device is not recorded",
        "controller/copies/gpu.py",
        "                self._used[number] = event_on(self._stream)\n                moving",
        "                moving",
        COPIES,
    ),
    Mutant(
        "a piece from the device is recorded before its copy",
        "controller/copies/gpu.py",
        "                staged.copy_(there, non_blocking=True)\n"
        "                self._used[number] = event_on(self._stream)\n",
        "                self._used[number] = event_on(self._stream)\n"
        "                staged.copy_(there, non_blocking=True)\n",
        COPIES,
    ),
    Mutant(
        "copies do not come after the engine's streams",
        "controller/copies/gpu.py",
        "                self._stream.wait_event(event)\n",
        "                pass\n",
        COPIES,
    ),
    Mutant(
        "copies are left before they have ended",
        "controller/copies/gpu.py",
        "                self._stream.synchronize()",
        "                pass",
        COPIES,
    ),
    Mutant(
        "the end of a layer lies before its copy",
        "controller/copies/gpu.py",
        "        return Copied((self._device, event_on(self._stream)))",
        "        return Copied((self._device, torch.cuda.Event()))",
        COPIES,
    ),
    Mutant(
        "copies come after one stream of the engine's",
        "controller/copies/gpu.py",
        "for stream in self._after()]",
        "for stream in self._after()[:1]]",
        COPIES,
    ),
    Mutant(
        "a layer is waited for on the device of the thread",
        "controller/copies/gpu.py",
        "torch.cuda.current_stream(device).wait_event",
        "torch.cuda.current_stream().wait_event",
        COPIES,
    ),
    Mutant(
        "a fork does not come after another stream",
        "controller/copies/gpu.py",
        "                first.wait_stream(stream)\n",
        "                pass\n",
        COPIES,
    ),
    Mutant(
        "another stream does not come after a fork",
        "controller/copies/gpu.py",
        "                stream.wait_stream(first)\n",
        "                pass\n",
        COPIES,
    ),
    Mutant(
        "a stream translates before another has copied the map",
        "forward/translation.py",
        "            torch.cuda.current_stream(self._table.device).wait_event(self._copied)\n",
        "            pass\n",
        ("tests/unit/forward/test_forward.py",),
    ),
    Mutant(
        "a translation takes the map when it is first asked, and never looks again",
        "forward/translation.py",
        "        if self._version == self._map.version:\n",
        "        if self._version >= 0 and self._table[:-1].any():\n",
        STALENESS,
    ),
    Mutant(
        "a translation is kept by length",
        "forward/translation.py",
        "return torch.add(offsets, self._table[pages], alpha=self.page_size).to(torch.int32)\n",
        "kept = torch.add(offsets, self._table[pages], alpha=self.page_size).to(torch.int32)\n"
        "        return vars(_never).setdefault(f'{id(self)} {locs.numel()}', kept)\n",
        STALENESS,
    ),
    Mutant(
        "a graph writes windows where its batch does not say",
        "forward/graph.py",
        "            self.out_cache_loc_swa[: batch.tokens_count].copy_(locs)\n",
        "            pass\n",
        STALENESS,
    ),
]
