"""Directory of a supervised cluster: its state, its logs, and the lock that tells whether its supervisor lives.

lock              locked by the supervisor as long as it lives, which the kernel guarantees; holds its process id
state.json        a ``ClusterState``, replaced atomically
supervisor.log    one line of JSON for each event
master.log, node-0.log, round_trip.log and so on: output of Mooncake
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from unified_cache.cluster.child import wait_until
from unified_cache.errors import ConfigError

__all__ = ["ClusterDirectory", "ClusterState", "MemberState"]

LOCK_TIMEOUT_S = 0.5
"""Longest wait for the lock: other processes hold it for a moment when they test it."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """State of one process of a cluster. ``phase`` is the value of a ``ProcessPhase``."""

    name: str
    address: str
    pid: int
    phase: str
    restarts_count: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    """State of a cluster, as its supervisor publishes it. ``started_s`` counts from 1970; the master comes first."""

    url: str
    admin: str
    segment_bytes: int
    started_s: float
    members: tuple[MemberState, ...]

    @classmethod
    def from_json(cls, text: str) -> "ClusterState":
        """Read a state that ``json.dumps(asdict(state))`` wrote."""
        fields = json.loads(text)
        members = tuple(MemberState(**member) for member in fields.pop("members"))
        return cls(**fields, members=members)


@dataclass(frozen=True, slots=True)
class ClusterDirectory:
    """Directory of one cluster at a time."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> "ClusterDirectory":
        """Make the directory, private to this user, if it is not there.

        Raises:
            ConfigError: it cannot be made or written, or others may write to it.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--dir must be a directory that can be made, found {path}: {error.strerror}") from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"--dir must be a directory that can be written, found {path}")
        return cls.at(path.resolve())

    @classmethod
    def at(cls, path: Path) -> "ClusterDirectory":
        """Name a directory, whether it is there or not: what it says, and which process it names, is believed.

        Raises:
            ConfigError: it belongs to another user, or others may write to it.
        """
        try:
            status = path.stat()
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            raise ConfigError(f"--dir must be a directory that can be read, found {path}: {error.strerror}") from error
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"--dir must be a directory of user {os.geteuid()}, who runs this, found owner {status.st_uid}: {path}"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"--dir must be a directory that only its owner writes to, found mode "
                f"{stat.S_IMODE(status.st_mode):04o} of {path}"
            )
        return cls(path)

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor lives."""
        try:
            with self._lock_path.open("r+", encoding="utf-8") as lock:
                return not _locked(lock)
        except FileNotFoundError:
            return False

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor; that of the last one if none lives, 0 if none is known."""
        try:
            text = self._lock_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return 0
        return int(text) if text.isdecimal() else 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the supervisor's lock. The state of a dead supervisor is removed first, and ours at the end; logs stay.

        Raises:
            ConfigError: there is one already.
        """
        self._lock_path.touch(mode=0o600)
        with self._lock_path.open("r+", encoding="utf-8") as lock:
            if not wait_until(lambda: _locked(lock), LOCK_TIMEOUT_S):
                raise ConfigError(
                    f"a cluster runs in {self.path} already (supervisor: process {self.supervisor_pid}); "
                    f"unified-cache cluster down ends it, another --dir goes beside it"
                )
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            self._forget()
            try:
                yield
            finally:
                self._forget()

    def clean(self) -> None:
        """Clean away what a dead supervisor left.

        Raises:
            ConfigError: a supervisor lives.
        """
        if self.path.is_dir():
            with self.held():
                pass

    def write(self, state: ClusterState) -> None:
        """Publish the state, whole or not at all."""
        draft = self._draft_path
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600, exist_ok=False)
        draft.write_text(json.dumps(asdict(state)), encoding="utf-8")
        draft.replace(self._state_path)

    def read(self) -> ClusterState | None:
        """Return the state, or None if no cluster is ready here."""
        try:
            return ClusterState.from_json(self._state_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def empty_logs(self) -> None:
        """Truncate all logs; a process that has one open goes on at its start. What is a link stays as it is."""
        for log in self.path.glob("*.log"):
            with suppress(OSError):  # a log is opened in the same way when it is written, and says then what is wrong
                descriptor = os.open(log, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.ftruncate(descriptor, 0)
                finally:
                    os.close(descriptor)

    def _forget(self) -> None:
        for path in (self._state_path, self._draft_path):
            path.unlink(missing_ok=True)

    @property
    def _state_path(self) -> Path:
        return self.path / "state.json"

    @property
    def _draft_path(self) -> Path:
        return self.path / "state.draft"

    @property
    def _lock_path(self) -> Path:
        return self.path / "lock"


def _locked(lock: IO[str]) -> bool:
    """Take the lock, until the file is closed; tell whether it was free."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
