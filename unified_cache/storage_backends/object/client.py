"""Requests to a bucket: each call of obstore's, its errors in one line of ours, and a batch of them side by side."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.common.bounded_call import CallThreads, current_call
from unified_cache.storage_backends.object.address import NO_PROXY, is_panic
from unified_cache.storage_backends.protocol import NAMES_MAX

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

Item = TypeVar("Item")
Result = TypeVar("Result")

LISTING_S = 30.0
"""Of a listing's next part: a service may answer with empty parts for ever."""

LASTING = (PermissionDeniedError, UnauthenticatedError, FileNotFoundError, ValueError)
"""Errors that asking again does not end."""

FORBIDDEN = frozenset({"403 Forbidden", "403 Forbidden (AccessDenied)"})
"""What is said of a policy; expired credentials have another code, but where an answer has no body."""

_STATUS = re.compile(r"status code: (\d{3}[ A-Za-z-]*)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CREDENTIALS = re.compile(r"169\.254\.|metadata\.google")
_URL = re.compile(r"\w+://\S+")
_SYSTEM = re.compile(r'(?:message|error): "([A-Za-z ]{1,64})(?:: [A-Za-z ]{1,64})?"')
"""What the operating system said, in the source of an error."""
_CERTIFICATE = re.compile(r"InvalidCertificate\((?:\s*Other\(\s*OtherError\()?\s*(\w{1,64})")


class ForbiddenError(StorageError):
    """A policy denies a request."""


class Bucket:
    """One prefix of a bucket, request by request; each raises StorageError where it failed. Thread-safe."""

    def __init__(self, name: str, store: "ObjectStore") -> None:
        """``name`` is for messages."""
        self.name = name
        self._store = store

    def size_of(self, name: str) -> int | None:
        """Return the bytes of an object, None if there is none."""
        with self._plain_errors("head", name), suppress(FileNotFoundError):
            return obstore.head(self._store, name)["size"]
        return None

    def read(self, name: str, bytes_max: int, bytes_min: int = 0) -> memoryview | int | None:
        """Return an object, or its length alone where that is not within bounds; None if there is none.

        No more than ``bytes_max`` is read, whatever lies there.
        """
        with self._plain_errors("get", name), suppress(FileNotFoundError):
            found = obstore.get(self._store, name)
            size = found.meta["size"]
            if not bytes_min <= size <= bytes_max:
                return size
            # One part is all of it; another one comes only where an answer is longer than it says.
            parts = iter(found.stream(min_chunk_size=max(size, 1)))
            content = memoryview(next(parts, b""))
            if len(content) == size and next(parts, None) is None:
                return content
            raise OSError("the answer is longer than it says")
        return None

    def create(self, name: str, content: bytes) -> bool:
        """Put an object unless there is one; return whether there was none. Nobody ever sees a part of it."""
        try:
            with self._plain_errors("put", name), suppress(AlreadyExistsError):
                obstore.put(self._store, name, content, mode="create")
                return True
        except StorageError as error:
            if "NotImplemented" not in str(error) and "501" not in str(error):
                raise
            reason = "; a store needs a service that takes puts with If-None-Match: *, this one does not"
            raise StorageError(f"{error}{reason}", retryable=False) from None
        return False

    def replace(self, name: str, content: bytes) -> None:
        """Put an object in the place of whatever is there."""
        with self._plain_errors("put", name):
            obstore.put(self._store, name, content, use_multipart=False)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, those that are not there too; in few requests where the service takes many names at once.

        One by one, where it does not, they end with the call that they are a part of.
        """
        if not names:
            return
        caller = current_call()
        with self._plain_errors("delete", f"{len(names)} objects"):
            try:
                obstore.delete(self._store, names)
            except FileNotFoundError:
                for name in names:
                    if caller is not None:
                        caller.check()
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, name)

    def listed(self, place: str, after: str = "") -> Iterator[list[tuple[str, int]]]:
        """Yield names below ``place/`` with their bytes, in order and after that name, without ``place/``.

        A listing that goes on for ever ends with the call that it is a part of.
        """
        caller = current_call()
        last = after = f"{place}/{after}"
        with self._plain_errors("list", place):
            listing = obstore.list(self._store, place, offset=after, chunk_size=NAMES_MAX)
            while chunk := _in_time(partial(_next_part, listing)):
                names = [last, *[each["path"] for each in chunk]]
                if names != sorted(names):
                    raise StorageError(f"{self.name} must list names in order, found another order", retryable=False)
                last = names[-1]
                if caller is not None:
                    caller.check()
                yield [(each["path"].removeprefix(f"{place}/"), each["size"]) for each in chunk]

    def places_in(self, place: str) -> list[str]:
        """Return what stands between ``place/`` and the next slash of names."""
        with self._plain_errors("list", place):
            found = _in_time(partial(obstore.list_with_delimiter_async, self._store, place))["common_prefixes"]
            return [each.rpartition("/")[2] for each in found]

    @contextmanager
    def _plain_errors(self, request: str, name: str) -> Iterator[None]:
        """Raise what obstore raises as a StorageError of one line, without addresses and without its cause."""
        try:
            yield
            return
        except (BaseError, OSError, ValueError) as error:
            text, retryable = reason_of(str(error)), not isinstance(error, LASTING)
            is_forbidden = isinstance(error, PermissionDeniedError) and text in FORBIDDEN
        except BaseException as error:
            if not is_panic(error):
                raise
            text, retryable, is_forbidden = f"a bug of obstore: {reason_of(str(error))}", False, False
        if is_forbidden and request in ("head", "get"):
            text += "; S3 says so of a name that is not there to who may not list: it takes s3:ListBucket"
        kind = ForbiddenError if is_forbidden else StorageError
        raise kind(f"{self.name}: {request} of {name}: {text}", retryable=retryable)


async def _next_part(listing: "AsyncIterator[Sequence[ObjectMeta]]") -> "Sequence[ObjectMeta]":
    try:
        return await anext(listing)
    except StopAsyncIteration:
        return ()


def _in_time(ask: Callable[[], Awaitable[Result]]) -> Result:
    """Wait for a part of a listing, which may take many requests; raise OSError where it does not end in time."""

    async def bounded() -> Result:
        return await asyncio.wait_for(ask(), LISTING_S)

    try:
        with ThreadPoolExecutor(1) as thread:  # the caller's may have a loop of its own
            return thread.submit(asyncio.run, bounded()).result()
    except TimeoutError:
        raise OSError(f"the listing does not go on within {LISTING_S:g} s") from None


def reason_of(text: str) -> str:
    """Return what a message of obstore's says, but for addresses: they may be signed."""
    text, _, source = text.partition("\n\nDebug source")
    if _CREDENTIALS.search(text):
        return "no credentials in the environment, and the machine gave none"
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return status[1].strip() + (f" ({code[1]})" if code is not None else "")
    if text.endswith("builder error"):
        return "an endpoint of http: is used only where the variable ..._ALLOW_HTTP is true"
    if NO_PROXY.removeprefix("http://") in source:
        return "it sends us to a host that no variable names, which is not followed"
    if '"dns error"' in source:
        return "the name of its host is not known"
    certificate = _CERTIFICATE.search(source)
    if certificate is not None:
        return f"its certificate is not trusted ({certificate[1]}); SSL_CERT_FILE names other authorities"
    if "InvalidContentType" in source:
        return "no TLS is spoken there; is it an endpoint of http:?"
    if "TimedOut" in source:
        return "no answer in time"
    if "IncompleteBody" in source:
        return "the answer ended before its length"
    system = _SYSTEM.search(source)
    if system is not None:
        return system[1]
    return _URL.sub("...", " ".join(text.rpartition(" - ")[2].split()))[:200]


class RequestThreads:
    """Threads that make the requests of a call side by side, with the caller's own. Thread-safe."""

    def __init__(self, requests_max: int) -> None:
        """``requests_max`` are those of one call at a time; calls share the threads."""
        self._requests_max = requests_max
        self._threads = CallThreads("object-request", max(requests_max - 1, 1))

    def each(self, items: Sequence[Item], ask: Callable[[Item], Result]) -> list[Result | StorageError | None]:
        """Make a request for each item; return what it returned or raised, None where none was made.

        None is made after one that failed for good, or once the caller was given up. All are over on return.
        """
        found: list[Result | StorageError | None] = [None] * len(items)
        waiting = deque(range(len(items)))
        caller = current_call()

        def work() -> None:
            while waiting:
                try:
                    number = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                if caller is not None:
                    caller.check()
                try:
                    found[number] = ask(items[number])
                except StorageError as error:
                    # Its traceback holds frames, and with them the caller's pages.
                    found[number] = error.with_traceback(None)
                    if not error.retryable:
                        waiting.clear()

        helpers = [self._threads.submit(work) for _ in range(min(len(items), self._requests_max) - 1)]
        try:
            work()
        finally:
            started = [helper for helper in helpers if not self._threads.withdraw(helper)]
            for helper in started:
                helper.settle(TIMEOUT_MAX)
        for helper in started:
            helper.result()
        return found

    def close(self) -> None:
        """Release the threads; no call may be in flight."""
        self._threads.close(0)
