"""The HTTP side of a Mooncake master: whether it serves, what nodes it counts on, and which keys there are."""

import http.client
from collections.abc import Callable, Iterable
from typing import TypeVar

from unified_cache.errors import StorageError
from unified_cache.storage_backends.mooncake.hosts import KNOCK_TIMEOUT_S, knock

__all__ = ["MasterAdmin"]

CAPACITY = b"master_total_capacity_bytes "
"""Begins the line among the metrics that says how much memory all nodes give."""

LISTING_TIMEOUT_S = 30.0
"""Between two pieces of a listing of all keys, which the master builds before it answers."""

AdminReply = TypeVar("AdminReply")


class MasterAdmin:
    """Asks the master over HTTP; a connection per question. Thread-safe."""

    __slots__ = ("_host", "_port")

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def check_serves(self) -> None:
        """Have the master say that it serves, if its HTTP side is there at all.

        Raises:
            StorageError: it is there, and does not say so within ``KNOCK_TIMEOUT_S``.
        """
        try:
            knock(self._host, self._port)
        except StorageError:
            return  # the admin port is needed for listings alone
        self._ask("/health", KNOCK_TIMEOUT_S, _text)

    def segments(self) -> frozenset[str]:
        """Return which nodes the master counts on, by their addresses; none where it does not answer."""
        try:
            return frozenset(self._ask("/get_all_segments", KNOCK_TIMEOUT_S, _text).split())
        except StorageError:
            return frozenset()

    def capacity_bytes(self) -> int | None:
        """Return how much memory all nodes give together; None where the master does not say so."""
        try:
            lines = self._ask("/metrics", KNOCK_TIMEOUT_S, lambda answer: answer.read().splitlines())
        except StorageError:
            return None
        said = next((line.removeprefix(CAPACITY) for line in lines if line.startswith(CAPACITY)), b"")
        return int(said) if said.isdigit() else None

    def keys(self, wanted: Callable[[str], bool]) -> list[str]:
        """List the keys of the whole cluster that are ``wanted``, in no order. Linear in all keys there are.

        Raises:
            StorageError: the master does not answer.
        """
        return self._ask("/get_all_keys", LISTING_TIMEOUT_S, lambda answer: _wanted_lines(answer, wanted))

    def _ask(self, path: str, timeout_s: float, read: Callable[[http.client.HTTPResponse], AdminReply]) -> AdminReply:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise StorageError(f"{self._name(path)} answers {answer.status} {answer.reason}", retryable=True)
            return read(answer)
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(
                f"{self._name(path)} does not answer: {error}; the port of the master's HTTP side is option admin",
                retryable=True,
            ) from error
        finally:
            connection.close()

    def _name(self, path: str) -> str:
        return f"http://{self._host}:{self._port}{path}"


def _text(answer: http.client.HTTPResponse) -> str:
    return answer.read().decode(errors="replace")


def _wanted_lines(lines: Iterable[bytes], wanted: Callable[[str], bool]) -> list[str]:
    names = (line.rstrip(b"\n").decode(errors="replace") for line in lines)
    return [name for name in names if wanted(name)]
