"""Our stores and service beside LMCache's, on one core: rates, and what each makes of flipped bits and of a restart.

Every store has a process of its own; they take turns. LMCache 0.5.6 runs in a Python of its own, which
UNIFIED_CACHE_LMCACHE_PYTHON names (``pip install --no-deps lmcache==0.5.6``, torch, and what its imports ask for);
without it the section says so, and measures the service alone. Ratios are our rate by theirs: more is better.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import NamedTuple

from benchmarks.measure import Comparison, Figure, Spread
from benchmarks.plan import BenchmarkPlan

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "UNIFIED_CACHE_LMCACHE_PYTHON"
CORE = 0
END_S = 30.0
"""Time for a store, and its server, to end."""
SIZES = ((64, 256), (1024, 48), (4096, 16))
"""KiB of a page, and pages of a turn."""

OURS, THEIRS = ("file", "packed"), ("fs_native", "local_disk")
RATES = {"put": 1.0, "get": 0.75}
"""What is measured in MB/s, and which part of ``fs_native`` is wanted."""

SERVED = "grpc"
"""Our service over ``file:``; beside it gRPC alone with messages as long, and the Python server of LMCache."""
BARE = "bare"


class Rivals(NamedTuple):
    """Stores that take turns, and the part of each rate of the first of theirs that is wanted of ours."""

    ours: Sequence[str]
    theirs: Sequence[str]
    wanted: Mapping[str, float]


RIVALS = (Rivals(OURS, THEIRS, RATES), Rivals((SERVED,), (BARE, "lm"), {"put": 0.9, "get": 0.9}))

FLIPPED = 16
NEXT, FLIPS = "found by the next process", f"{FLIPPED} flipped bits handed out as hits"
"""What a store does with pages that are on the disk."""

Turn = dict[str, float]


def lmcache_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Measure in directories that are gone afterwards; where LMCache cannot run, the service beside bare gRPC alone."""
    has_lmcache = PYTHON in os.environ
    if not has_lmcache:
        sys.stderr.write(f"LMCache is not measured: {PYTHON} names no Python that has it\n")
    for kib, pages in SIZES:
        with _directory(plan) as place, ExitStack() as opened:
            for rivals in RIVALS if has_lmcache else (RIVALS[-1]._replace(theirs=(BARE,)),):
                stores = {
                    kind: opened.enter_context(StoreProcess(kind, Path(place) / kind, kib << 10, pages))
                    for kind in (*rivals.ours, *rivals.theirs)
                }
                size = f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"
                yield from _rate_figures(size, _turns(stores, plan, pages), rivals)
    if not has_lmcache:
        return
    with _directory(plan) as place:
        kept = {kind: _kept_pages(kind, Path(place) / kind) for kind in (*OURS, *THEIRS)}
    for kind in OURS:
        for name in (NEXT, FLIPS):
            ours, theirs = kept[kind][name], {each: kept[each][name] for each in THEIRS}
            against = tuple(
                Comparison(f"LMCache {each}", count, ours / max(1, count)) for each, count in theirs.items()
            )
            yield Figure("lmcache", f"{kind}: {name}", "pages", Spread.of([ours]), against)


def _directory(plan: BenchmarkPlan) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="unified-cache-bench-", dir=plan.storage_dir)


def _turns(stores: "dict[str, StoreProcess]", plan: BenchmarkPlan, pages: int) -> dict[str, list[Turn]]:
    taken: dict[str, list[Turn]] = {kind: [] for kind in stores}
    for number in range(plan.effort.depth_rounds + 1):
        for kind in sorted(stores, reverse=number % 2 == 1):
            found = stores[kind].ask("turn", number * pages)
            if number:  # the first does not count
                taken[kind].append(found)
    return taken


def _rate_figures(size: str, turns: dict[str, list[Turn]], rivals: Rivals) -> Iterator[Figure]:
    for kind in rivals.ours:
        for name in (*RATES, "exists", "one"):
            ours = [turn[name] for turn in turns[kind]]
            against = tuple(
                _comparison(each, name, ours, [turn[name] for turn in turns[each]], {} if number else rivals.wanted)
                for number, each in enumerate(rivals.theirs)
            )
            unit = "MB/s" if name in RATES else "us"
            own, served = (
                median(turn[f"{name}_{each}"] for turn in turns[kind]) for each in ("s_per_gb", "served_s_per_gb")
            )
            processor = f"{own:.2f} s/GB of processor" + (f", {served:.2f} of the server's" if served else "")
            note = processor if name in RATES else "ratio: their time by ours"
            called = "look-up of one page" if name == "one" else name
            yield Figure("lmcache", f"{kind}: {called}, pages of {size}", unit, Spread.of(ours), against, note)


def _comparison(
    kind: str, name: str, ours: Sequence[float], theirs: Sequence[float], wanted: Mapping[str, float]
) -> Comparison:
    ratio = median(own / their for own, their in zip(ours, theirs, strict=True))
    against = "bare gRPC" if kind == BARE else f"LMCache {kind}"
    return Comparison(against, median(theirs), ratio if name in RATES else 1 / ratio, at_least=wanted.get(name))


def _kept_pages(kind: str, root: Path) -> dict[str, float]:
    """Put pages, ask the next process for them, flip a bit in some, and ask again; return what was answered."""
    kib, pages = SIZES[0]
    with StoreProcess(kind, root, kib << 10, pages) as store:
        store.ask("turn", 0)
    with StoreProcess(kind, root, kib << 10, pages) as store:
        kept = store.ask("found", 0)["right"]
        if not kept:
            store.ask("turn", 0)
        store.ask("flip", FLIPPED)
        return {NEXT: kept, FLIPS: store.ask("found", 0)["wrong"]}


class StoreProcess:
    """One store, in a process on one core."""

    def __init__(self, kind: str, root: Path, page_bytes: int, pages: int) -> None:
        root.mkdir(exist_ok=True)
        is_ours = kind in (*OURS, SERVED, BARE)
        module, python = ("ours", sys.executable) if is_ours else ("theirs", os.environ[PYTHON])
        command = [python, "-m", f"benchmarks.lmcache_{module}", kind, str(root), str(page_bytes), str(pages)]
        variables = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            ["taskset", "-c", str(CORE), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != PYTHON} | variables,
        )

    def ask(self, name: str, number: int) -> Turn:
        """Let it do something, and return what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {number}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"a store ended with status {self._process.wait()}")

    def __enter__(self) -> "StoreProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
