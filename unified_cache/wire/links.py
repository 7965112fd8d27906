"""Links: Unix sockets between a client and a server of one machine, that carry calls beside gRPC.

A call of gRPC in Python costs 0.3 ms and more of both processors, whatever it asks; a message over a socket that a
thread waits at, 15 us. So a client of the same machine offers the server a socket, by a call of gRPC (``Link``), which
says who it is as any call does; what follows over the socket are the same calls, in frames of ``service.proto``.

The socket has an abstract name, which is no file and needs none to be removed: whoever dies leaves nothing behind.
Either end checks that the other is a process of the same user, and the server proves that it was told the name.
"""

import os
import re
import secrets
import socket
import struct
from contextlib import suppress

from google.protobuf.message import Message

from unified_cache.errors import InputError

__all__ = ["LINK_PROOF_BYTES", "LinkOffer", "LinkSocket", "connected_link", "framed"]

LINK_PROOF_BYTES = 32
"""Random bytes that the server sends first, and only the client and whom it called know."""

CONNECT_S = 1.0
"""Longest wait for the other end while a link is made; it is on this machine and has been told."""

_NAME_PREFIX = "unified-cache-"
_NAME = re.compile(re.escape(_NAME_PREFIX) + r"[0-9a-f]{32}")
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end, as SO_PEERCRED has them."""

_TIME = struct.Struct("@ll")
"""Seconds and microseconds, as the system has them."""

_CHUNK_BYTES = 64 << 10
"""Read at a time; most frames are shorter than a hundredth of that."""


class LinkSocket:
    """One end of a link: frames each way. One thread reads and writes; any may shut it.

    ``frame_bytes_max`` is the longest frame that is read.
    """

    __slots__ = ("_connection", "_frame_bytes_max", "_read")

    def __init__(self, connection: socket.socket, frame_bytes_max: int) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._frame_bytes_max = frame_bytes_max
        self._read = bytearray()
        """Bytes of frames that were not asked for yet."""

    def send(self, frame: Message) -> None:
        """Send a frame.

        Raises:
            TimeoutError: the other end did not read in time.
            OSError: it has gone.
        """
        try:
            self._connection.sendall(framed(frame))
        except BlockingIOError as error:
            raise TimeoutError("the other end does not read") from error

    def receive(self) -> bytes | None:
        """Wait for a frame and return it; None where the other end has gone.

        Raises:
            TimeoutError: none came in time. What has come of it stays for the next time.
            InputError: it is longer than a frame may be.
        """
        read = self._read
        while True:
            if len(read) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(read)
                if length > self._frame_bytes_max:
                    raise InputError(f"a frame has at most {self._frame_bytes_max} bytes, found {length}")
                end = _LENGTH.size + length
                if len(read) >= end:
                    frame = bytes(memoryview(read)[_LENGTH.size : end])
                    del read[:end]
                    return frame
            try:
                chunk = self._connection.recv(_CHUNK_BYTES)
            except BlockingIOError as error:
                raise TimeoutError("the other end does not answer") from error
            except OSError:
                return None
            if not chunk:
                return None
            read += chunk

    def wait_at_most(self, seconds: float) -> None:
        """Bound every later wait of ``send`` and ``receive``, to a millisecond at the least."""
        # The bound of the system, and not of Python, which asks it once more before every call.
        whole_ms = max(1, round(seconds * 1000))
        bound = _TIME.pack(whole_ms // 1000, whole_ms % 1000 * 1000)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    @property
    def is_quiet(self) -> bool:
        """Whether the other end is there and has sent nothing that was not received."""
        return not self._read and self._peeked() is None

    @property
    def is_open(self) -> bool:
        """Whether the other end is there."""
        return self._peeked() != b""

    def shut(self) -> None:
        """End the link at once, from any thread: who waits at either end finds that the other has gone."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def deafen(self) -> None:
        """Read nothing further than what has come, from any thread; what is to be sent still goes out."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Give the socket back; nobody may wait at it."""
        self._connection.close()

    def _peeked(self) -> bytes | None:
        """Return the next byte without taking it, none at the end; None where there is none yet."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""


class LinkOffer:
    """A socket that a client listens at for one server, once. Whoever makes it closes it."""

    __slots__ = ("_listener", "name", "proof")

    def __init__(self, listener: socket.socket, name: str, proof: bytes) -> None:
        self._listener = listener
        self.name = name
        """As the server is told."""
        self.proof = proof

    @classmethod
    def listen(cls) -> "LinkOffer":
        """Listen under a random name.

        Raises:
            OSError: this system has no such sockets.
        """
        name, proof = _NAME_PREFIX + secrets.token_hex(16), secrets.token_bytes(LINK_PROOF_BYTES)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + name)
            listener.listen()
            listener.settimeout(CONNECT_S)
        except OSError:
            listener.close()
            raise
        return cls(listener, name, proof)

    def accepted(self, frame_bytes_max: int) -> LinkSocket | None:
        """Return the link that the server has connected; None where nobody has that proves it.

        Raises:
            OSError: nobody connected, or whoever did is silent.
        """
        connection, _ = self._listener.accept()
        is_proved = False
        try:
            connection.settimeout(CONNECT_S)
            proof = b""
            while len(proof) < LINK_PROOF_BYTES and (chunk := connection.recv(LINK_PROOF_BYTES - len(proof))):
                proof += chunk
            is_proved = secrets.compare_digest(proof, self.proof) and _is_of_this_user(connection)
            return LinkSocket(connection, frame_bytes_max) if is_proved else None
        finally:
            if not is_proved:
                connection.close()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


def framed(message: Message) -> bytes:
    """Return a message with its length before it."""
    content = message.SerializeToString()
    return _LENGTH.pack(len(content)) + content


def connected_link(name: str, proof: bytes, frame_bytes_max: int) -> LinkSocket:
    """Connect to the socket that a client offers, and prove to be whom it was offered to.

    Raises:
        InputError: a name or a proof of another form, nobody of this user listens there, or it does not answer.
    """
    if not _NAME.fullmatch(name) or len(proof) != LINK_PROOF_BYTES:
        raise InputError("a link goes by a name and a proof of fixed form")
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
    return LinkSocket(connection, frame_bytes_max)


def _is_of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
