"""An environment in which the commands of docs/vllm.md are what a user has: ``pip``, ``vllm`` and ``unified-cache``."""

# pyright: reportMissingImports=false
import os
import shutil
import subprocess
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.engines.vllm.engine import ENVIRONMENT
from tests.engines.vllm.installation import engine_packages
from tests.sources import ROOT, repository_files

COMMAND_S = 600.0
"""Longest wait for a command; reached only where something hangs."""

CPU_MODULE = "cpu_kv_offloading"
"""What vLLM lacks on a machine without a GPU, as a module of this environment."""

VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
"""On the index vLLM for the CPU has another name, by which its own command does not find its version."""

VLLM_COMMAND = """import sys
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class UserShell:
    """A virtual environment over the engine's packages, and the directory that commands run in.

    Neither knows the repository: what runs here is the package as ``pip`` installs it.
    """

    environment: Path
    directory: Path

    @classmethod
    def make(cls, directory: Path) -> "UserShell":
        """Make an environment that has vLLM and not this package."""
        environment = directory / "environment"
        venv.create(environment, with_pip=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "engine.pth").write_text(f"import site; site.addsitedir({str(engine_packages())!r})\n")
        shutil.copyfile(ROOT / "tests" / "engines" / "vllm" / "cpu.py", packages / f"{CPU_MODULE}.py")
        metadata = packages / "vllm-0.32.0+cpu.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(VLLM_METADATA)
        command = environment / "bin" / "vllm"
        command.write_text(f"#!{environment / 'bin' / 'python'}\n{VLLM_COMMAND}")
        command.chmod(0o755)
        shell = cls(environment, directory / "work")
        shell.directory.mkdir()
        return shell

    def install(self, command: Sequence[str]) -> None:
        """Run the document's ``pip install``, with the package of this tree in place of the index's."""
        tree = self.directory / "tree"
        for name in repository_files():
            copy = tree / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
        self.run([str(tree) if word == "unified-cache" else word for word in command])

    def run(self, command: Sequence[str]) -> str:
        """Run a command to its end and return what it printed; it must succeed."""
        found = subprocess.run(
            self.located(command),
            check=False,
            cwd=self.directory,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )
        assert not found.returncode, f"{' '.join(command)}\n{found.stdout}"
        return found.stdout

    def located(self, command: Sequence[str]) -> list[str]:
        """Return a command with the path of its program, which is this environment's."""
        return [str(self.environment / "bin" / command[0]), *command[1:]]

    def variables(self) -> dict[str, str]:
        """Return the variables of a user who has activated the environment."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        engine = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**inherited, **engine, "PATH": path, "VIRTUAL_ENV": str(self.environment)}
