"""The process that an object with locks, threads or open files belongs to, which is not the one that it forks."""

import os

from unified_cache.core.errors import StateError


class HomeProcess:
    """The process that made an object; a forked child has a copy of the object, and is refused its use.

    The child has none of its parent's threads, so nobody releases a lock that one of them held, and a lock of a file
    that it has from its parent is the parent's. To look costs no call of the system.
    """

    __slots__ = ("_name", "_process_id")

    _running_id = os.getpid()

    def __init__(self, name: str) -> None:
        """``name`` says in messages what it is that belongs to the process."""
        self._name = name
        self._process_id = HomeProcess._running_id

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self._process_id == HomeProcess._running_id

    def check(self) -> None:
        """Raise StateError in a forked child."""
        if self._process_id != HomeProcess._running_id:
            raise StateError(
                f"{self._name} must be used in process {self._process_id}, which opened it, found its forked child "
                f"{self._running_id}; open it after the fork, or start that process by spawn"
            )

    @staticmethod
    def note_fork() -> None:
        """Know the id of this process, a child just forked."""
        HomeProcess._running_id = os.getpid()


os.register_at_fork(after_in_child=HomeProcess.note_fork)
