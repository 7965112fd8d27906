"""Functions between a caller's get of one page and the call that leaves them: frames are counted, not time."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.sources import ROOT
from tests.support.running_service import running
from unified_cache.core.config import GuardConfig
from unified_cache.storage_backends.common.bounded_call import CallThreads, run_here
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import LAYOUT, MODEL, blank_page, label, sealed_page

PRODUCT = f"{ROOT / 'unified_cache'}{os.sep}"

FILE_DEPTH_MAX = 9
"""From the verified get to the read of the file."""

SERVICE_DEPTH_MAX = 26
"""From the verified get to the call of gRPC, and from the handler of the service to the read of the file."""


class CallDepths:
    """A profiler of all threads: notes how many of our functions stand one in another where a call leaves them."""

    def __init__(self) -> None:
        self.caller: FrameType | None = None
        """Who asks, and is not counted; None while nobody does, and nothing is noted."""
        self.sent = 0
        """Where a client calls gRPC."""
        self.handed_over = 0
        """Where a thread gives a call of a store to another one."""
        self.read = 0
        """Where a file is read."""

    def __call__(self, frame: FrameType, event: str, called: object) -> None:
        if self.caller is None:
            return
        if event == "c_call" and called is os.preadv:
            self.read = self._depth_of(frame)
        elif event == "call" and frame.f_code is CallThreads.submit.__code__:
            self.handed_over = self._depth_of(frame) - 1
        elif event == "call" and frame.f_code.co_qualname.endswith("MultiCallable.__call__"):
            self.sent = self._depth_of(frame)

    def _depth_of(self, frame: FrameType | None) -> int:
        count = 0
        while frame is not None and frame is not self.caller:
            count += frame.f_code.co_filename.startswith(PRODUCT)
            frame = frame.f_back
        return count


@contextmanager
def profiled() -> Iterator[CallDepths]:
    """Profile this thread and those that start meanwhile."""
    depths = CallDepths()
    threading.setprofile(depths)
    sys.setprofile(depths)
    try:
        yield depths
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def get_page(url: str, depths: CallDepths) -> None:
    """Put a page into a store and get it, guarded and verified, on a thread of a cache's kind."""
    opened = open_storage(url)
    store = VerifiedStorage(StorageGuard(opened, declared_capability(opened), GuardConfig()))
    store.register(manifest_of(MODEL, LAYOUT), {})
    assert store.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]

    def get() -> list[Answer]:
        depths.caller = sys._getframe()
        try:
            return store.get([blank_page(label(1))])
        finally:
            depths.caller = None

    assert run_here(get).result() == [Answer.HIT]
    store.close()


def test_a_get_of_a_page_in_a_file_is_at_most_nine_functions_deep(tmp_path: Path) -> None:
    with profiled() as depths:
        get_page(f"file:{tmp_path}", depths)
    assert 0 < depths.read <= FILE_DEPTH_MAX


def test_a_get_of_a_page_through_a_service_is_at_most_twenty_six_functions_deep_at_both_ends(tmp_path: Path) -> None:
    with profiled() as depths, running(storage=f"file:{tmp_path}") as served:
        get_page(f"grpc://{served.address}", depths)
    by_place = depths.sent, depths.handed_over, depths.read
    assert min(by_place) > 0
    assert sum(by_place) <= SERVICE_DEPTH_MAX


def test_a_client_gets_pages_on_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    started_by: list[int] = []

    def start(self: threading.Thread) -> None:
        started_by.append(threading.get_ident())
        started(self)

    with running() as served, closing(open_storage(f"grpc://{served.address}")) as store:
        store.register(manifest_of(MODEL, LAYOUT), {})
        assert store.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
        started = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", start)
        assert store.get([blank_page(label(1))]) == [Answer.HIT]
        assert threading.get_ident() not in started_by
