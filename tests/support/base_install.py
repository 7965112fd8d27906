"""Processes in which packages of extras cannot be imported, as after ``pip install unified-cache``.

``without_torch`` is the environment of a process that lacks torch alone, and so do all that it starts: what a service
or a storage node runs in. Run as a program, this module lacks the packages of all extras; it takes command lines as
JSON on standard input, and answers with the exit status and the standard error of each.
"""

import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.metadata import packages_distributions

from tests.sources import ROOT

DEVELOPMENT = "dev"
"""The extra that tests are run with: it brings the others, and what tests need."""

OURS = "unified-cache"
"""Named by extras that contain others."""

WITHOUT_TORCH = ROOT / "tests" / "support" / "without_torch"


class ExtrasRefused(MetaPathFinder):
    """Says of every package that an extra installs that it is not there."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse what belongs to an extra; leave everything else to the finders behind this one.

        Raises:
            ModuleNotFoundError: an extra installs it.
        """
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_torch(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process that finds no torch, and neither do those that it starts."""
    before = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join(map(str, (WITHOUT_TORCH, before or ROOT)))}


def refuse_extras(*kept: str) -> ExtrasRefused:
    """Make every later import of an extra's package fail, but for those of the extras ``kept``; return what does it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    there = {_distribution(each) for extra in kept for each in extras[extra]} | {OURS}
    wanted = {_distribution(each) for extra, needs in extras.items() if extra != DEVELOPMENT for each in needs} - there
    packages = {
        package
        for package, distributions in packages_distributions().items()
        if wanted.intersection(map(_normalised, distributions))
    }
    finder = ExtrasRefused(frozenset(packages))
    sys.meta_path.insert(0, finder)
    return finder


def _distribution(requirement: str) -> str:
    return _normalised(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(arguments: list[str]) -> tuple[int, str]:
    """Run one command line; return its exit status and its standard error."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        status: int = import_module("unified_cache.cli.main").run(arguments)
    return status, errors.getvalue()


if __name__ == "__main__":
    refuse_extras()
    json.dump([_run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
