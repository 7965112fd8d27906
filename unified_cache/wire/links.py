"""Links: Unix sockets between a client and a server of one machine, that carry calls beside gRPC.

A call of gRPC in Python costs 0.3 ms and more of both processors, whatever it asks; a message over a socket that a
thread waits at, 15 us. So a client of the same machine offers the server a socket, by a call of gRPC (``Link``), which
says who it is as any call does; what follows over the socket are the same calls, in frames of ``service.proto``.

``local_sockets`` says how the two ends meet.
"""

import math
import socket
import struct
import time
from contextlib import suppress

from google.protobuf.message import Message

from unified_cache.errors import InputError

__all__ = ["LinkSocket", "framed"]

_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("@ll")
"""Seconds and microseconds, as the system has them."""

_CHUNK_BYTES = 64 << 10
"""Read at a time; most frames are shorter than a hundredth of that."""

_SENT_BYTES = 32 << 10
"""Sent at a time: the system takes them at once or not at all. It cuts more, and waits its longest for each piece."""

_WAIT_S_MIN = 0.001
"""As short as the system waits."""


class LinkSocket:
    """One end of a link: frames each way. One thread reads and writes; any may shut it.

    ``frame_bytes_max`` is the longest frame that is read.
    """

    __slots__ = ("_bounds_ms", "_connection", "_frame_bytes_max", "_read", "_wait_s")

    def __init__(self, connection: socket.socket, frame_bytes_max: int) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._frame_bytes_max = frame_bytes_max
        self._read = bytearray()
        """Bytes of frames that were not asked for yet."""
        self._wait_s = math.inf
        self._bounds_ms = {socket.SO_RCVTIMEO: 0, socket.SO_SNDTIMEO: 0}
        """What the system was told last; 0 for no bound."""

    def send(self, frame: Message) -> None:
        """Send a frame.

        Raises:
            TimeoutError: the other end did not read in time.
            OSError: it has gone.
        """
        content = memoryview(framed(frame))
        ends_s = time.monotonic() + self._wait_s
        try:
            while content:
                self._bound(socket.SO_SNDTIMEO, ends_s)
                content = content[self._connection.send(content[:_SENT_BYTES]) :]
        except BlockingIOError as error:
            raise TimeoutError("the other end does not read") from error

    def receive(self) -> bytes | None:
        """Wait for a frame and return it; None where the other end has gone.

        Raises:
            TimeoutError: none came in time. What has come of it stays for the next time.
            InputError: it is longer than a frame may be.
        """
        read = self._read
        ends_s = time.monotonic() + self._wait_s
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
            self._bound(socket.SO_RCVTIMEO, ends_s)
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
        """Bound the time of every later ``send`` and ``receive``, to a millisecond at the least."""
        self._wait_s = max(seconds, _WAIT_S_MIN)

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

    def _bound(self, option: int, ends_s: float) -> None:
        """Have the system wait no longer than until then.

        Raises:
            TimeoutError: it is over. A frame that comes in pieces, none of which is late, is late as a whole.
        """
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("a frame took longer than it may")
        # The bound of the system, and not of Python, which asks it once more before every call.
        whole_ms = max(1, round(left_s * 1000)) if left_s < math.inf else 0
        if whole_ms != self._bounds_ms[option]:
            self._connection.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(whole_ms // 1000, whole_ms % 1000 * 1000))
            self._bounds_ms[option] = whole_ms

    def _peeked(self) -> bytes | None:
        """Return the next byte without taking it, none at the end; None where there is none yet."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""


def framed(message: Message) -> bytes:
    """Return a message with its length before it."""
    content = message.SerializeToString()
    return _LENGTH.pack(len(content)) + content
