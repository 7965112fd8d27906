"""Stores that misbehave on purpose, opened inside of an engine by URL.

    tests.engines.sglang.faults:open_faulty:METHOD/FAULT/URL        every call of a method has a fault
    tests.engines.sglang.faults:open_doomed:METHOD/WHAT/URL         the store vanishes as a method is called

METHOD and FAULT are names of ``Method`` and ``StorageFault``, such as GET/HANG/file:/tmp/store. WHAT is the number of
the store's server, which is killed, or ``directory``, which is removed.
"""

import os
import random
import shutil
import signal
from collections.abc import Callable

from tests.support.faulty_storage import FaultPlan, FaultyStorage, StorageFault
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.layer import Method

__all__ = ["OPENED", "doomed_url", "faulty_url", "open_doomed", "open_faulty"]

HANG_S = 60.0
"""Far longer than any deadline here, so that a call that waits for it shows."""

OPENED: list[FaultyStorage] = []
"""Every store of this process that was opened here, for whoever counts its calls and lets those go that hang."""

DIRECTORY = "directory"


class FaultOfMethod:
    """Gives every call of one method a fault."""

    def __init__(self, method: Method, fault: StorageFault) -> None:
        self._method, self._fault = method, fault

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Return the fault, if it is that method."""
        return self._fault if method is self._method else None


class LossInCall:
    """Gives no call a fault, and makes the store vanish before the first call of one method goes on."""

    def __init__(self, method: Method, lose: Callable[[], None]) -> None:
        self._method, self._lose, self._is_lost = method, lose, False

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Make the store vanish, if it is the first call of that method."""
        if method is self._method and not self._is_lost:
            self._is_lost = True
            self._lose()
        return None


def faulty_url(method: Method, fault: StorageFault, url: str) -> str:
    """Name a store over ``url`` of which every call of ``method`` has a fault."""
    return f"{__name__}:open_faulty:{method.name}/{fault.name}/{url}"


def doomed_url(method: Method, url: str, server: int | None = None) -> str:
    """Name a store that vanishes in its first call of ``method``: its server is killed, or its directory removed."""
    return f"{__name__}:open_doomed:{method.name}/{server or DIRECTORY}/{url}"


def open_faulty(rest: str, bytes_max: int | None) -> StorageBackend:
    """Open a store that has a fault."""
    method, fault, url = rest.split("/", 2)
    return _open(url, bytes_max, FaultOfMethod(Method[method], StorageFault[fault]))


def open_doomed(rest: str, bytes_max: int | None) -> StorageBackend:
    """Open a store that vanishes."""
    method, what, url = rest.split("/", 2)

    def lose() -> None:
        if what == DIRECTORY:
            shutil.rmtree(url.partition(":")[2])
        else:
            os.kill(int(what), signal.SIGKILL)

    return _open(url, bytes_max, LossInCall(Method[method], lose))


def _open(url: str, bytes_max: int | None, plan: FaultPlan) -> FaultyStorage:
    store = FaultyStorage(open_storage(url, bytes_max=bytes_max), plan, random.Random(0), hang_s_max=HANG_S)
    OPENED.append(store)
    return store
