"""Every version of the engines that we say we run under: our checks, and the engine's own tests over our stores.

    make engines                                all of it, hours; installs 3 GB for each version
    make engines ARGS="--only vllm-0.33.0 --checks tier faults"
    make engines ARGS=--newest                  the newest version of each engine that is newer than the range
    make engines ARGS=--imports                 what is installed of the range imports us; part of make check

An engine's tests come with its source, from the package index, and are never copied. One that fails and is to is a pin,
listed with its reason in ``peers``. SGLang's index has wheels alone, without tests.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.engines.sglang import install as sglang
from tests.engines.vllm import installation as vllm
from tests.sources import ROOT

VERSIONS = {"vllm": ("0.31.0", "0.32.0", "0.33.0"), "sglang": ("0.5.21", "0.5.22", "0.5.23")}

IMPORTS = {
    "vllm": "import unified_cache.integrations.vllm.connector, unified_cache.integrations.vllm.tier",
    "sglang": "import os; from tests.engines.sglang import absent; absent.provide(os.environ['SGLANG_WHEEL']); "
    "from unified_cache.integrations.sglang import UnifiedCacheHiCache",
}
"""What every version of an engine's range has of ours."""

PEERS = Path(__file__).with_name("peers")

VLLM_SUITES = (
    "test_fs_tier.py",
    "test_tiering_offloading.py",
    "test_backpressure.py",
    "test_metrics.py",
    "test_factory.py",
    "test_tier_poll_thread.py",
)
"""In vLLM's source, of its tests of a secondary tier; the last there since 0.33."""

HANG_S = 1800


@dataclass(frozen=True, slots=True)
class SuiteOutcome:
    """Outcome of one suite under one version."""

    engine: str
    check: str
    passed: int
    failed: tuple[str, ...]
    pinned: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    """Why, of each."""

    def __str__(self) -> str:
        counts = f"{self.passed:6} {len(self.failed):6} {len(self.pinned):5} {len(self.skipped):7}"
        return f"{self.engine:14} {self.check:28} {counts}"


def pins_of(engine: str) -> frozenset[str]:
    """Return the tests that fail and are to, under every version of an engine and under this one."""
    paths = (PEERS / f"{name}_pins.txt" for name in (engine.partition("-")[0], engine))
    lines = [line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines()]
    return frozenset(line.partition("|")[0].strip() for line in lines if not line.startswith("#"))


def run(engine: str, check: str, command: Sequence[str], variables: dict[str, str], place: Path) -> SuiteOutcome:
    """Run pytest and count."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        ended = subprocess.run(
            [*command, f"--junitxml={report}"], cwd=place, env={**os.environ, **variables}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if not report.exists():
            sys.stdout.write(ended.stdout[-4000:])
            return SuiteOutcome(engine, check, 0, ("nothing was collected",))
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {f"{case.get('classname')}::{case.get('name')}": {part.tag for part in case} for case in cases}
    wrong = [name for name, tags in outcomes.items() if tags & {"failure", "error"}]
    skipped = tuple(part.get("message", "") for case in cases for part in case.iter("skipped"))
    pins = pins_of(engine)
    pinned = tuple(name for name in wrong if re.sub(r"\[.*", "", name.rpartition("::")[2]) in pins)
    failed = tuple(name for name in wrong if name not in pinned)
    return SuiteOutcome(engine, check, len(cases) - len(wrong) - len(skipped), failed, pinned, skipped)


def our_checks(name: str, engine: str, chosen: Sequence[str]) -> Iterator[SuiteOutcome]:
    """Run our own checks of an engine, file by file."""
    place = ROOT / "tests" / "engines" / name
    for path in sorted(place.glob("check_*.py")):
        if not chosen or path.stem.removeprefix("check_") in chosen:
            options = (
                "-p",
                "no:cacheprovider",
                "-o",
                "python_files=check_*.py",
                "-o",
                "python_functions=check_*",
                "-q",
            )
            command = (sys.executable, "-m", "pytest", *options, f"--timeout={HANG_S}", str(path))
            yield run(engine, path.stem, command, {}, ROOT)


def vllm_rows(version: str, chosen: Sequence[str]) -> Iterator[SuiteOutcome]:
    """Run our checks under a version of vLLM, and its own tests of a tier over our tier."""
    engine = f"vllm-{version}"
    os.environ[vllm.VERSION_VARIABLE] = version
    python, source = vllm.engine_python(), vllm.source()
    with tempfile.TemporaryDirectory() as directory:
        # Beside the tests lies the engine's Python without its binaries, which must not be imported.
        place = Path(directory)
        (place / "tests").symlink_to(source / "tests")
        variables = {"PYTHONPATH": f"{place}:{PEERS}:{ROOT}"}
        options = ("-p", "no:cacheprovider", "-p", "vllm_tests", "--noconftest", "-c", os.devnull, "-q")
        suites = "tests/v1/kv_offload/tiering"
        for name in VLLM_SUITES:
            if (source / suites / name).exists():
                command = (str(python), "-m", "pytest", *options, f"--rootdir={place}", f"{suites}/{name}")
                yield run(engine, f"vllm's {name}", command, variables, place)
    yield from our_checks("vllm", engine, chosen)


def sglang_rows(version: str, chosen: Sequence[str]) -> Iterator[SuiteOutcome]:
    """Run our checks under a version of SGLang; those of the linker are skipped, and say why, where it has none."""
    os.environ[sglang.VERSION_VARIABLE] = version
    engine = f"sglang-{version}"
    yield SuiteOutcome(engine, "sglang's own tests", 0, (), (), ("its wheel has none, and the index no source",))
    yield from our_checks("sglang", engine, chosen)


def imports(name: str, version: str) -> SuiteOutcome:
    """Import our classes under a version of an engine, if it is installed."""
    os.environ.update({vllm.VERSION_VARIABLE: version, sglang.VERSION_VARIABLE: version})
    found, engine = sglang.installation(), f"{name}-{version}"
    python, variables = (found.python, found.environment) if name == "sglang" else (vllm.environment_python(), {})
    if not python.exists():
        return SuiteOutcome(engine, "imports", 0, (), (), ("not installed: make engines does it",))
    ended = subprocess.run(
        [str(python), "-c", IMPORTS[name]], cwd=ROOT, env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    failed = ended.stderr.splitlines()[-1:] if ended.returncode else []
    return SuiteOutcome(engine, "imports", int(not failed), tuple(failed))


def newest(name: str) -> Iterator[str]:
    """Return the newest version of an engine in the index, if it is newer than ours."""
    command = (sys.executable, "-m", "pip", "index", "versions", name)
    found = re.search(
        rf"^{name} \((.+)\)", subprocess.run(command, capture_output=True, text=True, check=True).stdout, re.MULTILINE
    )
    assert found, f"the index knows no {name}"
    if _numbers(found[1]) > _numbers(VERSIONS[name][-1]):
        yield found[1]


def _numbers(version: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", version)))


def main() -> int:
    """Run what was asked for and print the table, a row when it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--imports", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], metavar="ENGINE-VERSION")
    parser.add_argument("--checks", nargs="+", default=[], metavar="NAME")
    asked = parser.parse_args()
    versions = {name: tuple(newest(name)) if asked.newest else known for name, known in VERSIONS.items()}
    sys.stdout.write(f"{'engine':14} {'check':28} passed failed  pins skipped\n")
    failed: list[str] = []
    skipped: set[str] = set()
    for name, rows in (("vllm", vllm_rows), ("sglang", sglang_rows)):
        if not versions[name]:
            sys.stdout.write(f"{name:14} the index has nothing newer than {VERSIONS[name][-1]}\n")
        for version in versions[name]:
            if asked.only and f"{name}-{version}" not in asked.only:
                continue
            for row in [imports(name, version)] if asked.imports else rows(version, asked.checks):
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
                failed += (f"{row.engine}: {test}" for test in row.failed)
                skipped |= {f"{row.engine}: {why}" for why in row.skipped}
    sys.stdout.write("".join(f"skipped: {each}\n" for each in sorted(skipped)))
    sys.stdout.write("".join(f"failed: {each}\n" for each in failed))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
