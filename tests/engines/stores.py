"""Stores that go wrong while an engine runs, by URL: ``tests.engines.stores:faulty:DIRECTORY``."""

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.support.store_calls import ScriptedStorage, StorageFault
from unified_cache.core.seal import Label
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import Method
from unified_cache.storage_backends.wrappers.layer import StorageLayer

HANG_S = 600.0
"""Longer than anybody waits."""

OPENED: list[ScriptedStorage] = []
"""Every faulty store that this process has opened, for those who count its calls and let those go that hang."""

_Asked = TypeVar("_Asked", Label, PageIO)


def without_room(url: str) -> str:
    """Return the URL of a ``file:`` store that is to leave free what its file system has, and so takes nothing."""
    place = Path(url.partition(":")[2]).parent
    return f"{url}?free={shutil.disk_usage(place).total - 1}"


class FaultSwitch:
    """Faults of a store in another process, said in files of its directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._faults = directory / "faults"
        self._order = directory / "order"

    def set(self, **faults: StorageFault) -> None:
        """Give methods a fault each, by name; all others have none."""
        self._write(self._faults, "".join(f"{method}={fault.value}\n" for method, fault in faults.items()))

    def remove_directory_in(self, method: Method, directory: Path) -> None:
        """Have a directory removed in the middle of the next call of a method."""
        self._write(self._order, json.dumps({"method": method.value, "directory": str(directory)}))

    def kill_process_in(self, method: Method, process: int) -> None:
        """Have a process killed in the middle of the next call of a method."""
        self._write(self._order, json.dumps({"method": method.value, "process": str(process)}))

    @property
    def is_struck(self) -> bool:
        """Whether what was to happen in the middle of a call has happened."""
        return not self._order.exists()

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Return the fault of a method now."""
        lines = self._faults.read_text().splitlines() if self._faults.exists() else []
        faults = dict(line.split("=") for line in lines)
        return StorageFault(faults[method.value]) if method.value in faults else None

    def blow(self, method: Method) -> Callable[[], None] | None:
        """Return what is to happen in the middle of this call; the first call of its method alone gets it."""
        try:
            order: dict[str, str] = json.loads(self._order.read_text())
            if order["method"] != method.value:
                return None
            # Of several calls at a time one takes it.
            self._order.rename(self._order.with_suffix(".taken"))
        except FileNotFoundError:
            return None
        if "directory" in order:
            return lambda: shutil.rmtree(order["directory"])
        return lambda: os.kill(int(order["process"]), signal.SIGKILL)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        swap = path.with_suffix(".new")
        swap.write_text(text)
        swap.replace(path)


class TroubledStorage(StorageLayer):
    """A store that may lose its ground in the middle of a call: after half of its batch."""

    def __init__(self, backend: Store, switch: FaultSwitch) -> None:
        super().__init__(backend)
        self._switch = switch

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        return self._halved(Method.EXISTS, labels, self._backend.exists)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        return self._halved(Method.GET, pages, self._backend.get)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        return self._halved(Method.PUT, pages, lambda part: self._backend.put(part, level))

    def _halved(
        self, method: Method, batch: Sequence[_Asked], ask: Callable[[Sequence[_Asked]], list[Answer]]
    ) -> list[Answer]:
        blow = self._switch.blow(method)
        if blow is None:
            return ask(batch)
        half = len(batch) // 2
        answers = ask(batch[:half])
        blow()
        return answers + ask(batch[half:])


def faulty_url(directory: Path, url: str = "") -> str:
    """Name the store of ``url``, or a directory of files, whose faults a switch in this directory says."""
    directory.mkdir(exist_ok=True)
    (directory / "url").write_text(url or f"file:{directory / 'pages'}")
    return f"{__name__}:faulty:{directory}"


def faulty(rest: str, bytes_max: int | None) -> ScriptedStorage:
    """Open such a store."""
    directory = Path(rest)
    switch = FaultSwitch(directory)
    backend = open_storage((directory / "url").read_text(), bytes_max=bytes_max)
    store = ScriptedStorage(TroubledStorage(backend, switch), switch, random.Random(0), hang_s_max=HANG_S)
    OPENED.append(store)
    return store


def hanging_url() -> str:
    """Name a store whose opening hangs."""
    return f"{__name__}:hanging"


def hanging(rest: str, bytes_max: int | None) -> Store:
    """Hang for longer than anybody waits."""
    threading.Event().wait(HANG_S)
    return open_storage("memory:", bytes_max=bytes_max)
