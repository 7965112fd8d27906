"""Tests that need a GPU: ``make gpu`` runs them all, and every other run skips them where there is none."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from importlib.util import find_spec
from typing import TypeVar

import pytest
import torch

from tests.support.late_device import LateDevice
from unified_cache.controller import memory
from unified_cache.controller.copies.gpu import StagedCopies

Test = TypeVar("Test", bound=Callable[..., object])

GPU = torch.device("cuda", 0)
BUSY_CYCLES = 50_000_000
"""Cycles of a GPU's clock that keep a stream busy: 25 ms and more."""

NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: make gpu runs these where one is"),
)


NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: torch for CUDA brings it")
STREAMED = (
    "late",
    pytest.param("late-kernel", marks=NEEDS_TRITON),
    pytest.param("cuda", marks=NEEDS_GPU),
    pytest.param("cuda-kernel", marks=(*NEEDS_GPU, NEEDS_TRITON)),
)
"""Kinds of device that have streams: with copies through pinned buffers, or by a kernel."""


def needs_gpu(test: Test) -> Test:
    """Mark a test that shows nothing without a GPU."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


def devices(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on the CPU, and the same code on a device that does all as late as it may, and on a GPU."""
    return _on(("cpu", *STREAMED), test)


def with_streams(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of streams on a device that does all as late as it may, and on a GPU."""
    return _on(STREAMED, test)


def _on(kinds: Sequence[object], test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def run(device: str, **arguments: object) -> None:
        kind, _, by_kernel = device.partition("-")
        with LateDevice() if kind == "late" else nullcontext(), pytest.MonkeyPatch.context() as patch:
            if not by_kernel:
                patch.setattr(memory, "gpu_copies", lambda: StagedCopies)
            test(device=torch.device("cpu") if device == "cpu" else GPU, **arguments)

    marked: Callable[..., None] = pytest.mark.parametrize("device", kinds)(run)
    return marked


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that is ordered after nothing."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch says no types
    return stream


def keep_busy(device: torch.device) -> None:
    """Give a device's current stream work that takes it a while; the call returns before."""
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # torch says no types
