"""Thoroughness of a run, and the settings that its sections share."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import Calibration


@dataclass(frozen=True, slots=True)
class Effort:
    """Repetitions and sizes of every section."""

    match_rounds: int
    """Rounds of ten timed calls each."""
    copy_rounds: int
    copy_bytes: int
    file_rounds: int
    durable_rounds: int
    link_rounds: int
    mooncake_rounds: int
    bucket_rounds: int
    depth_rounds: int


FULL = Effort(
    match_rounds=40,
    copy_rounds=9,
    copy_bytes=128 << 20,
    file_rounds=41,
    durable_rounds=5,
    link_rounds=5,
    mooncake_rounds=25,
    bucket_rounds=9,
    depth_rounds=7,
)

QUICK = Effort(
    match_rounds=8,
    copy_rounds=3,
    copy_bytes=64 << 20,
    file_rounds=5,
    durable_rounds=1,
    link_rounds=3,
    mooncake_rounds=5,
    bucket_rounds=2,
    depth_rounds=2,
)


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """Settings that every section receives."""

    effort: Effort
    calibration: Calibration
    storage_dir: Path | None
    """Directory in which files are put and got; None stands for the system's directory for temporary files."""
