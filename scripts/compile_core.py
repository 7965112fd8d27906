"""Compile the core while a wheel is built: a hook of hatchling's over mypyc.

What pyproject.toml lists is compiled from the very files that are there; they are in the wheel, too, so that tracebacks
and readers find them. ``UNIFIED_CACHE_COMPILE`` decides: ``1`` asks for it, and fails where it cannot be done; ``0``
declines it; without, it is done where a C compiler is at hand on 64-bit Linux, and a wheel of plain Python is built
elsewhere. An editable installation is never compiled: what is edited there must be what runs.
"""

import os
import platform
import shutil
import sysconfig
import tempfile
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CHOICE = "UNIFIED_CACHE_COMPILE"

REQUIRES = ("mypy>=2.4", "setuptools>=77")
"""What compiling takes: mypyc, which is part of mypy, and setuptools, which calls the compiler."""

MYPY_SETTINGS = """\
[mypy]
follow_imports = skip
ignore_missing_imports = True
disable_error_code = var-annotated

[mypy-numpy.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
"""Types are checked elsewhere; what lies outside the core is taken for what it is when it comes, installed or not."""

LIBRARY = "unified_cache.core"
"""Name that the library begins with: in one library all modules call each other directly. It lies beside the lowest of
them, since importing it must import none."""


class CompiledCoreHook(BuildHookInterface[Any]):
    """Adds to a wheel the compiled forms of the modules that ``compiled`` lists and ``interpreted`` does not."""

    _scratch: Path | None = None
    """Where it is compiled, until the wheel is there."""

    def dependencies(self) -> list[str]:
        """Return what the build needs beside hatchling."""
        return list(REQUIRES) if self._is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the results in the build; the wheel's tag becomes that of this Python and platform.

        Raises:
            Exception: of any kind, where ``UNIFIED_CACHE_COMPILE=1`` asked for it.
        """
        if version == "editable" or not self._is_wanted():
            return
        scratch = Path(tempfile.mkdtemp(prefix="unified-cache-compiled-", dir=os.environ.get("TMPDIR")))
        self._scratch = scratch
        try:
            made = compile_modules(Path(self.root), self._modules(), scratch)
        except (Exception, SystemExit) as error:  # compilers fail in their own ways, setuptools by ending the program
            if os.environ.get(CHOICE) == "1":
                raise
            self.app.display_warning(f"the core is left in plain Python, since it did not compile: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(scratch / name): name for name in made})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made on the way."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _is_wanted(self) -> bool:
        choice = os.environ.get(CHOICE, "")
        if choice in ("0", "1"):
            return choice == "1"
        return can_compile()

    def _modules(self) -> list[str]:
        root = Path(self.root)
        kept = set(self.config["interpreted"])
        found = {str(path.relative_to(root)) for pattern in self.config["compiled"] for path in root.glob(pattern)}
        return sorted(found - kept)


def can_compile() -> bool:
    """Return whether wheels are compiled here by default: CPython, its headers and a compiler, on 64-bit Linux."""
    if (platform.system(), platform.machine(), platform.python_implementation()) != ("Linux", "x86_64", "CPython"):
        return False
    compiler = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(compiler) is not None and (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def compile_modules(root: Path, modules: list[str], scratch: Path) -> list[str]:
    """Compile modules of the package, given as paths below ``root``; return the results, as paths below ``scratch``.

    Raises:
        Exception: of any kind; ``SystemExit`` among them.
    """
    mypyc, setuptools = import_module("mypyc.build"), import_module("setuptools")
    shutil.copytree(root / "unified_cache", scratch / "unified_cache", ignore=shutil.ignore_patterns("__pycache__"))
    settings = scratch / "mypy.ini"
    settings.write_text(MYPY_SETTINGS, encoding="utf-8")
    with chdir(scratch):
        extensions = mypyc.mypycify(
            [f"--config-file={settings}", *modules],
            opt_level="3",
            debug_level="0",
            group_name=LIBRARY,
            target_dir=str(scratch / "c"),
        )
        distribution = setuptools.Distribution({"name": "unified-cache-core", "ext_modules": extensions})
        command = distribution.get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(scratch / "lib"), str(scratch / "o")
        command.ensure_finalized()
        command.run()
    made = sorted((scratch / "lib").rglob("*.so"))
    for path in made:
        path.rename(scratch / path.relative_to(scratch / "lib"))
    return [str(path.relative_to(scratch / "lib")) for path in made]
