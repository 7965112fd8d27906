"""HTTP/2 by hand, for what no client library does: headers without a message, connections that do nothing."""

import socket
import struct
import time
from itertools import count

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER = struct.Struct(">BHBBI")
"""Length in one and two bytes, type, flags, stream."""

HEADERS, RST_STREAM, SETTINGS, PING = 1, 3, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4
METHOD_POST, SCHEME_HTTP = b"\x83", b"\x86"
"""Entries of the static table of HPACK."""

PATH, AUTHORITY = b"\x04", b"\x01"
"""Names of the static table, before a literal value."""

NEW_NAME = b"\x00"
STRING_PREFIX_MAX = 127


class RawConnection:
    """One connection to a server on this machine, which says only what it is told to."""

    def __init__(self, port: int, timeout_s: float = 10.0, *, answers_pings: bool = True) -> None:
        self._answers_pings = answers_pings
        self._timeout_s = timeout_s
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, b""))
        self._numbers = count(1, 2)
        self._received = b""
        self.open: set[int] = set()
        """Calls that were begun and have not ended, as far as frames were read."""

    def begin(self, path: str, calls_count: int, token: str = "") -> None:
        """Send the headers of calls, and no message."""
        block = METHOD_POST + SCHEME_HTTP + PATH + _string(path) + AUTHORITY + _string("localhost")
        headers = [("content-type", "application/grpc"), ("te", "trailers")]
        headers += [("authorization", f"Bearer {token}")] if token else []
        block += b"".join(NEW_NAME + _string(name) + _string(value) for name, value in headers)
        numbers = [next(self._numbers) for _ in range(calls_count)]
        self.open.update(numbers)
        self._write(b"".join(_frame(HEADERS, END_HEADERS, number, block) for number in numbers))

    def wait_until_open(self, calls_max: int, timeout_s: float) -> int:
        """Read frames until at most so many calls are open, or the time is over; return how many are."""
        ends_s = time.monotonic() + timeout_s
        while len(self.open) > calls_max and (left_s := ends_s - time.monotonic()) > 0:
            self._read_for(left_s)
        return len(self.open)

    def _read_for(self, timeout_s: float) -> None:
        """Read the frames that are there; where there are none, wait so long for some."""
        self._socket.settimeout(timeout_s)
        try:
            received = self._socket.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            received = b""
        if not received:
            self.open.clear()
        self._received += received
        self._read_frames()

    def close(self) -> None:
        """Close the connection, with what is open on it."""
        self._socket.close()

    def _write(self, content: bytes) -> None:
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(content)
        except OSError:
            self.open.clear()

    def _read_frames(self) -> None:
        while len(self._received) >= FRAME_HEADER.size:
            high, low, kind, flags, number = FRAME_HEADER.unpack_from(self._received)
            end = FRAME_HEADER.size + (high << 16 | low)
            if len(self._received) < end:
                return
            payload, self._received = self._received[FRAME_HEADER.size : end], self._received[end:]
            if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                self.open.discard(number)
            if kind == SETTINGS and not flags & ACK:
                self._write(_frame(kind, ACK, 0, b""))
            if kind == PING and not flags & ACK and self._answers_pings:
                self._write(_frame(kind, ACK, 0, payload))


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return FRAME_HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, number) + payload


def _string(text: str) -> bytes:
    """Write a literal as HPACK does: its length in a prefix of seven bits, and further ones."""
    encoded = text.encode()
    if len(encoded) < STRING_PREFIX_MAX:
        return bytes([len(encoded)]) + encoded
    left, further = len(encoded) - STRING_PREFIX_MAX, []
    while left >= 1 << 7:
        further.append(left % (1 << 7) | 1 << 7)
        left >>= 7
    return bytes([STRING_PREFIX_MAX, *further, left]) + encoded
