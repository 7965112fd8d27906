"""Tests that need a GPU: ``make gpu`` runs them all, and every other run skips them where there is none."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import TypeVar

import pytest
import torch

from tests.support.late_device import LateDevice

__all__ = ["GPU", "devices", "needs_gpu", "with_streams"]

Test = TypeVar("Test", bound=Callable[..., object])

GPU = torch.device("cuda", 0)
NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: make gpu runs these where one is"),
)


STREAMED = ("late", pytest.param("cuda", marks=NEEDS_GPU))
"""Kinds of device that have streams."""


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
        with LateDevice() if device == "late" else nullcontext():
            test(device=torch.device("cpu") if device == "cpu" else GPU, **arguments)

    marked: Callable[..., None] = pytest.mark.parametrize("device", kinds)(run)
    return marked
