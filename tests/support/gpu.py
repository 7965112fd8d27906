"""Tests that need a GPU: ``make gpu`` runs them all, and every other run skips them where there is none."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

__all__ = ["devices", "needs_gpu"]

Test = TypeVar("Test", bound=Callable[..., object])

GPU = torch.device("cuda", 0)
NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: make gpu runs these where one is"),
)


def needs_gpu(test: Test) -> Test:
    """Mark a test that shows nothing without a GPU."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


devices = pytest.mark.parametrize("device", [torch.device("cpu"), pytest.param(GPU, marks=NEEDS_GPU)], ids=str)
"""Runs a test on the CPU, and the same code on a GPU."""
