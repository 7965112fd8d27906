"""Unix socket of a server, held by a lock beside it as long as the server lives.

gRPC removes whatever socket it finds at its path and binds another one, without a word to who listens there. At its end
it removes the socket, whosever that is by then.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unified_cache.core.errors import ConfigError

CONNECT_S = 1.0
"""Wait for a process that may listen at the path; a full backlog counts as one."""

_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def held_socket(path: Path) -> Iterator[None]:
    """Keep other servers from a socket for the length of the with block; a socket that a dead one left is free.

    The lock is ``PATH.lock``, removed at the end.

    Raises:
        ConfigError: a server holds the path, or something listens there, or no lock can be made beside it.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        fd = _locked(lock)
    except BlockingIOError as error:
        raise ConfigError(f"unix:{path} must be free, found a server that holds it by {lock}") from error
    except OSError as error:
        raise ConfigError(f"unix:{path} needs a lock beside it: {lock}: {error.strerror}") from error
    try:
        if _is_in_use(path):
            raise ConfigError(f"unix:{path} must be free, found somebody who listens there")
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)


def _locked(lock: Path) -> int:
    """Make the lock or take one that nobody holds; return its descriptor."""
    while True:
        fd = os.open(lock, _LOCK_FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)  # its last holder has removed it meanwhile: another one may have its name


def _is_in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(CONNECT_S)
        try:
            caller.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            raise ConfigError(f"unix:{path} must be free, and cannot be asked: {error.strerror or error}") from error
    return True
