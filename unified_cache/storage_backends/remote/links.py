"""Links to a server on the same machine: made as calls need them, for one call at a time, dropped when in doubt."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from itertools import islice
from threading import Lock

import grpc
from google.protobuf.message import DecodeError

from unified_cache.errors import InputError
from unified_cache.proto import service_pb2 as pb
from unified_cache.storage_backends.common.backoff import Backoff
from unified_cache.storage_backends.common.breaker import CircuitBreaker
from unified_cache.wire.calls import Call
from unified_cache.wire.links import LinkSocket
from unified_cache.wire.local_sockets import SocketOffer

__all__ = ["LinkedCall", "ServerLinks"]

LINKS_MAX = 8
"""To one server; with more calls at a time, the others go over gRPC."""

FRAME_BYTES_MAX = 64 << 20
"""Longest answer: what a listing of a request's worth of pages takes, many times over."""

RETRY_S = 30.0
"""Until a server that made no link is asked again."""

_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""Codes of a server that has refused nothing; it is asked again with the next call."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _LinkError(grpc.RpcError, grpc.Call):
    """A call over a link that failed, as one of gRPC fails."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details
        self._trailing = trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return ()

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:  # type: ignore[override]  # that of calls
        return self._trailing

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


class LinkedCall:
    """One call over a link, for one thread at a time. A call that does not come to its end takes its link along.

    What fails while it begins is raised where its answer is waited for: that is where callers take memory back.
    """

    def __init__(self, links: "ServerLinks", link: LinkSocket, ends_s: float) -> None:
        self._links = links
        self._link: LinkSocket | None = link
        self._ends_s = ends_s
        """By the clock that sockets wait by."""
        self._failed: Exception | None = None

    def begin(self, call: Call, message: bytes) -> None:
        """Send the one message of a call."""
        try:
            self._send(pb.LinkedRequest(method=call.value, timeout_s=self._left_s(), message=message, is_last=True))
        except grpc.RpcError as error:
            self._failed = error

    def begin_stream(self, call: Call, messages: Iterable[bytes]) -> None:
        """Send the messages of a call as they are made, on this thread; what making one raises ends the call."""
        request = pb.LinkedRequest(method=call.value, timeout_s=self._left_s())
        try:
            for message in messages:
                request.message = message
                self._send(request)
                request = pb.LinkedRequest()
            request.is_last = True
            self._send(request)
        except (grpc.RpcError, InputError, OSError) as error:
            self.cancel()
            self._failed = error
        except BaseException:
            self.cancel()
            raise

    def answer(self) -> bytes:
        """Wait for the one answer.

        Raises:
            grpc.RpcError: the call failed.
        """
        with closing(iter(self)) as replies:
            messages = list(islice(replies, 2))
        if len(messages) != 1:
            raise _LinkError(grpc.StatusCode.INTERNAL, f"expected one answer, found {'more' if messages else 'none'}")
        return messages[0]

    def __iter__(self) -> Generator[bytes, None, None]:
        """Yield the answers that come in time.

        Raises:
            grpc.RpcError: the call failed.
            InputError, OSError: a message of it could not be made.
        """
        failed, self._failed = self._failed, None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # its traceback holds this frame, which would hold it, and with it the memory lent to the call
        is_last = False
        try:
            while not is_last:
                reply = self._received()
                is_last = reply.is_last
                if is_last:
                    self._finish(reply)
                if reply.HasField("message"):
                    yield reply.message
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the call where it is, and its link; nothing if it has ended."""
        link, self._link = self._link, None
        if link is not None:
            self._links.drop(link)

    def _received(self) -> pb.LinkedReply:
        link = self._open_link()
        try:
            if not self._left_s():
                raise TimeoutError  # a server that always has one more answer is late, too
            link.wait_at_most(self._left_s())
            frame = link.receive()
            if frame is not None:
                return pb.LinkedReply.FromString(frame)
        except TimeoutError:
            raise self._failing(grpc.StatusCode.DEADLINE_EXCEEDED, "the server did not answer in time") from None
        except (OSError, InputError, DecodeError) as error:
            raise self._failing(grpc.StatusCode.INTERNAL, f"the server sent what is no answer: {error}") from error
        except BaseException:
            self.cancel()
            raise
        raise self._failing(grpc.StatusCode.UNAVAILABLE, "the server has ended the link")

    def _send(self, request: pb.LinkedRequest) -> None:
        link = self._open_link()
        try:
            link.wait_at_most(self._left_s())
            link.send(request)
        except TimeoutError:
            raise self._failing(grpc.StatusCode.DEADLINE_EXCEEDED, "the server did not read in time") from None
        except OSError as error:
            raise self._failing(grpc.StatusCode.UNAVAILABLE, "the server has ended the link") from error
        except BaseException:
            self.cancel()
            raise

    def _finish(self, last: pb.LinkedReply) -> None:
        link, self._link = self._open_link(), None
        self._links.give_back(link)
        if last.code:
            trailing = tuple((entry.name, entry.value) for entry in last.trailing)
            code = _CODES.get(last.code, grpc.StatusCode.UNKNOWN)
            raise _LinkError(code, last.details, trailing)

    def _failing(self, code: grpc.StatusCode, details: str) -> _LinkError:
        """End the call, and return what is to be raised."""
        self.cancel()
        return _LinkError(code, details)

    def _open_link(self) -> LinkSocket:
        if self._link is None:
            raise _LinkError(grpc.StatusCode.CANCELLED, "the call is over")
        return self._link

    def _left_s(self) -> float:
        """Return how long the call may still wait."""
        return max(0.0, self._ends_s - time.monotonic())


class ServerLinks:
    """Links to one server. Thread-safe.

    ``offer`` has the server connect to a socket, within so many seconds; raises ``grpc.RpcError`` where it does not.
    """

    def __init__(self, offer: Callable[[SocketOffer, float], None], clock: Callable[[], float]) -> None:
        self._offer = offer
        self._free: list[LinkSocket] = []
        """The one used last is used next, so that few are in use."""
        self._count = 0
        self._is_offering = False
        self._is_closed = False
        self._breaker = CircuitBreaker(1, Backoff(RETRY_S, RETRY_S), clock)
        self._guard = Lock()

    def call(self, timeout_s: float) -> LinkedCall | None:
        """Return a call that may take so long; None where there is no link for it, or no time.

        A link that is to be made first is made by one thread; the others do without meanwhile.
        """
        if timeout_s <= 0:
            return None
        ends_s = time.monotonic() + timeout_s
        link = self._taken() or self._made(timeout_s)
        return None if link is None else LinkedCall(self, link, ends_s)

    def give_back(self, link: LinkSocket) -> None:
        """Take back a link whose call has come to its end."""
        with self._guard:
            if not self._is_closed:
                self._free.append(link)
                return
        self.drop(link)

    def drop(self, link: LinkSocket) -> None:
        """End a link."""
        link.shut()
        link.close()
        with self._guard:
            self._count -= 1

    def close(self) -> None:
        """End every link that no call uses, and others with their calls."""
        with self._guard:
            self._is_closed = True
            free, self._free = self._free, []
        for link in free:
            self.drop(link)

    def _taken(self) -> LinkSocket | None:
        while True:
            with self._guard:
                if not self._free:
                    return None
                link = self._free.pop()
            if link.is_quiet:
                return link
            self.drop(link)

    def _made(self, timeout_s: float) -> LinkSocket | None:
        with self._guard:
            is_in_vain = self._is_closed or self._is_offering or self._count >= LINKS_MAX
            if is_in_vain or self._breaker.is_resting:
                return None
            self._is_offering = True
            self._count += 1
        link: LinkSocket | None = None
        is_away = False
        try:
            link = self._offered(timeout_s)
        except grpc.RpcError as error:
            is_away = isinstance(error, grpc.Call) and error.code() in _AWAY
            error.__traceback__ = None  # a call that is its own error would keep what its caller was lent
        finally:
            with self._guard:
                self._is_offering = False
                self._count -= link is None
            if link is not None:
                self._breaker.record_success()
            elif not is_away:
                self._breaker.record_failure()
        return link

    def _offered(self, timeout_s: float) -> LinkSocket | None:
        with suppress(OSError):
            offer = SocketOffer.listen()
            try:
                self._offer(offer, timeout_s)
                return LinkSocket(offer.accepted(), FRAME_BYTES_MAX)
            finally:
                offer.close()
        return None
