"""Sockets that a client and a server of one machine meet at: one listens for the other once, under a random name.

A client offers the socket by a call of gRPC, which says who it is as any call does, and the server connects to it. The
name is abstract, which is no file and needs none to be removed: whoever dies leaves nothing behind. Either end checks
that the other is a process of the same user, and the server proves that it was told the name.
"""

import os
import re
import secrets
import socket
import struct
import time
from contextlib import suppress

from unified_cache.errors import InputError

__all__ = ["CONNECT_S", "SOCKET_PROOF_BYTES", "SocketOffer", "connected_socket"]

SOCKET_PROOF_BYTES = 32
"""Random bytes that the server sends first, and only the client and whom it called know."""

CONNECT_S = 1.0
"""Longest wait for the other end, which is on this machine and has been told."""

_NAME_PREFIX = "unified-cache-"
_NAME = re.compile(re.escape(_NAME_PREFIX) + r"[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end, as SO_PEERCRED has them."""


class SocketOffer:
    """A socket that a client listens at for one server, once. Whoever makes it closes it."""

    __slots__ = ("_listener", "name", "proof")

    def __init__(self, listener: socket.socket, name: str, proof: bytes) -> None:
        self._listener = listener
        self.name = name
        """As the server is told."""
        self.proof = proof

    @classmethod
    def listen(cls) -> "SocketOffer":
        """Listen under a random name.

        Raises:
            OSError: this system has no such sockets.
        """
        name, proof = _NAME_PREFIX + secrets.token_hex(16), secrets.token_bytes(SOCKET_PROOF_BYTES)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + name)
            listener.listen()
        except OSError:
            listener.close()
            raise
        return cls(listener, name, proof)

    def accepted(self) -> socket.socket:
        """Wait for the server to connect, and return the socket. Any process may see the name: strangers are let go.

        Raises:
            OSError: nobody has connected and proved to be the server in time.
        """
        ends_s = time.monotonic() + CONNECT_S
        while True:
            _wait_until(self._listener, ends_s)
            connection, _ = self._listener.accept()
            is_proved = False
            try:
                is_proved = _is_of_this_user(connection) and self._is_proved(connection, ends_s)
                if is_proved:
                    connection.settimeout(CONNECT_S)
                    return connection
            finally:
                if not is_proved:
                    connection.close()

    def _is_proved(self, connection: socket.socket, ends_s: float) -> bool:
        proof = b""
        while len(proof) < SOCKET_PROOF_BYTES:
            _wait_until(connection, ends_s)
            chunk = connection.recv(SOCKET_PROOF_BYTES - len(proof))
            if not chunk:
                return False
            proof += chunk
        return secrets.compare_digest(proof, self.proof)

    def withdraw(self) -> None:
        """Let nobody connect any more, from any thread: who waits in ``accepted`` returns."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Listen no more; nobody may wait in ``accepted``."""
        self._listener.close()


def connected_socket(name: str, proof: bytes) -> socket.socket:
    """Connect to the socket that a client offers, and prove to be whom it was offered to.

    Raises:
        InputError: a name or a proof of another form, nobody of this user listens there, or it does not answer.
    """
    if not _NAME.fullmatch(name) or len(proof) != SOCKET_PROOF_BYTES:
        raise InputError("a socket goes by a name and a proof of fixed form")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        connection.connect("\0" + name)
        if not _is_of_this_user(connection):
            raise InputError("no process of this server's user listens there")
        connection.sendall(proof)
    except OSError as error:
        connection.close()
        raise InputError("nobody listens there") from error
    except InputError:
        connection.close()
        raise
    return connection


def _wait_until(waiting: socket.socket, ends_s: float) -> None:
    """Have a socket wait no longer than until then.

    Raises:
        TimeoutError: it is over.
    """
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("nobody has proved to be the server in time")
    waiting.settimeout(left_s)


def _is_of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
