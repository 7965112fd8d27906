"""Description of this machine, and its speed at the primitives that the tree spends its time on."""

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Figure, Spread, Subject, interleaved, timed

ROOT = Path(__file__).resolve().parent.parent

MEMCMP_BYTES = 128 * 1024
"""A prompt of 32k tokens, encoded."""
MEMCPY_BYTES = 64 << 20
LOOKUPS_COUNT = 1_000_000
MEMCMP_REFERENCE_US = 1.3
"""MEMCMP_BYTES on the machine that the reference figures are from."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, the interpreter and the commit of a run."""

    cpu: str
    cores: int
    load_average: tuple[float, float, float]
    """Over 1, 5 and 15 minutes, before the run."""
    commit: str
    dirty: bool
    """The working tree held changes beyond that commit, other results aside."""
    python: str
    numpy: str
    torch: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Speed of this machine at primitives, so that figures of different machines compare."""

    memcmp_us: Spread
    dict_lookups_ms: Spread
    memcpy_gb_per_s: Spread

    @property
    def scale(self) -> float:
        """Slowness of this machine as a multiple of the reference machine's, by memcmp alone."""
        return scale_of(self.memcmp_us)

    def figures(self) -> tuple[Figure, ...]:
        """Return the line that opens the table."""
        note = f"reference machine {MEMCMP_REFERENCE_US} us, so this one counts as {self.scale:.2f} x slower"
        return (
            Figure("calibration", "memcmp of 128 KB", "us", self.memcmp_us, note=note),
            Figure("calibration", "a million dict look-ups", "ms", self.dict_lookups_ms),
            Figure("calibration", "memcpy of 64 MiB", "GB/s", self.memcpy_gb_per_s, note="reference machine 18 GB/s"),
        )


def memcmp_subject() -> Subject:
    """Make a subject that compares two equal objects of MEMCMP_BYTES."""
    left = os.urandom(MEMCMP_BYTES)
    right = bytes(bytearray(left))
    return timed(lambda: left == right)


def scale_of(memcmp_us: Spread) -> float:
    """Return the slowness of this machine as a multiple of the reference machine's, by memcmp."""
    return memcmp_us.median / MEMCMP_REFERENCE_US


def calibrate(rounds: int = 5) -> Calibration:
    """Time the primitives."""
    table = {number: number for number in range(1000)}

    def look_up_thousand() -> None:
        for number in range(1000):
            table[number]

    def look_up() -> None:
        for _ in range(LOOKUPS_COUNT // 1000):
            look_up_thousand()

    source = np.ones(MEMCPY_BYTES, np.uint8)
    target = np.zeros(MEMCPY_BYTES, np.uint8)
    (memcmp,) = interleaved([memcmp_subject()], rounds * 20, calls=10, warm=3)
    look_ups, copies = interleaved([timed(look_up), timed(lambda: np.copyto(target, source))], rounds)
    return Calibration(
        Spread.of([ns / 1e3 for ns in memcmp]),
        Spread.of([ns / 1e6 for ns in look_ups]),
        Spread.of([MEMCPY_BYTES / ns for ns in copies]),
    )


def machine() -> Machine:
    """Describe this machine, this interpreter and this commit."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    cores = os.cpu_count() or 1
    return Machine(
        _cpu_model(),
        cores,
        os.getloadavg(),
        commit,
        bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results")),
        platform.python_version(),
        np.__version__,
        torch.__version__,
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(*arguments: str) -> str:
    """Ask git about this repository; empty where it cannot tell."""
    try:
        asked = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""
