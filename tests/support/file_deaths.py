"""Die at every n-th call that a history makes on the disk, and check what is left; see ``test_file_crash``.

    python -m tests.support.file_deaths KIND DIRECTORY STRIDE

Forks, so it must be a process of its own, without threads. Prints how many writers died.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.file_history import StoreHistory, check_service, prepare
from tests.support.files import FaultyDisk
from tests.support.store_kinds import StoreKind

DEAD = 9
"""Exit status of a process that died where it was to."""


class DeadlyDisk(FaultyDisk):
    """A disk on which the process ends at one call, as by SIGKILL: no clean-up, no exception."""

    def __init__(self, number: int) -> None:
        super().__init__(failing=range(0))
        self.number = number

    def _call(self, name: str, right: Callable[..., object], *given: object, **named: object) -> object:
        if len(self.calls) == self.number:
            os._exit(DEAD)
        return super()._call(name, right, *given, **named)


def main(kind: StoreKind, directory: Path, stride: int) -> None:
    """Let one writer after the other die, each one call later."""
    died_count = 0
    for bytes_max in (None, 6 * kind.taken_bytes()):
        number = 0
        while True:
            root = directory / f"{bytes_max}-{number}"
            prepare(kind, root)
            history = StoreHistory(kind, root, DeadlyDisk(number), bytes_max)
            child = os.fork()
            if not child:
                history.play()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            check_service(root, history)
            if os.waitstatus_to_exitcode(status) != DEAD:
                break
            died_count += 1
            number += stride
    sys.stdout.write(f"{died_count}\n")


if __name__ == "__main__":
    main(StoreKind(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
