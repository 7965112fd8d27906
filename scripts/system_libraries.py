"""Install the system libraries that Mooncake needs, and etcd for its masters, on Debian and as root; elsewhere nothing.

Never fails: where one stays missing, the tests that need it are skipped and say so.
"""

import os
import shutil
import subprocess
import sys

from unified_cache.storage_backends.mooncake.native import apt_command, missing_packages

TIMEOUT_S = 120
"""For each command; a mirror that does not answer must not hold up the tests for long."""

LOCK = ("-o", "DPkg::Lock::Timeout=30", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10")


def main() -> None:
    """Install what is missing, and say so; nothing is missing most of the time."""
    missing = _missing()
    if not missing:
        return
    wanted = apt_command(missing)
    if os.geteuid() != 0 or shutil.which(wanted[0]) is None:
        _print(f"Mooncake needs {', '.join(missing)}, and only root on Debian can install them: {' '.join(wanted)}")
        return
    _print(f"Installing {', '.join(missing)}.")
    # The package lists may be as old as the image.
    if not _ran(wanted) and _ran([wanted[0], "update"]):
        _ran(wanted)
    left = _missing()
    if left:
        _print(f"Mooncake still needs {', '.join(left)}: {' '.join(apt_command(left))}")


def _missing() -> list[str]:
    return [*missing_packages(), *(["etcd-server"] if shutil.which("etcd") is None else [])]


def _ran(command: list[str]) -> bool:
    """Run apt-get without questions; return whether it succeeded."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    quiet = [command[0], "-qq", *LOCK, *command[1:]]
    try:
        result = subprocess.run(  # noqa: S603  # the command is ours
            quiet, check=False, capture_output=True, env=environment, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
