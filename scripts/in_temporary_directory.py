"""Run a command with ``{}`` replaced by a fresh directory, and remove the directory however the command ends.

    python scripts/in_temporary_directory.py COMMAND [ARGUMENT with {} in it]...

Exits with the command's status, or 128 plus the signal that ended it.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType


def run(command: Sequence[str]) -> int:
    """Run ``command`` in the foreground; return its exit status once the directory is gone."""
    with tempfile.TemporaryDirectory(prefix="unified-cache-") as directory:
        child = subprocess.Popen([word.replace("{}", directory) for word in command])  # noqa: S603  # ours to run

        def pass_on(number: int, frame: FrameType | None) -> None:
            child.send_signal(number)

        # A terminal sends Ctrl-C to both of us: the child ends by itself, we stay to clean up after it.
        signal.signal(signal.SIGINT, lambda number, frame: None)
        signal.signal(signal.SIGTERM, pass_on)
        signal.signal(signal.SIGHUP, pass_on)
        status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[1:]))
