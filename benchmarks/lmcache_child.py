"""One store in a process of its own, LMCache's or ours: it measures, counts and damages when it is told to.

It reads a word and a number a line, and answers each with a line of JSON. It imports nothing of ours, which LMCache's
Python does not have.
"""

import hashlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

BATCH_PAGES = 16
WAIT_S = 60.0
"""Longest wait for a batch."""

HEAD_BYTES = 8
ONES = 64
"""Pages that are looked up one by one."""

Found = Sequence[memoryview | None]
"""Bytes of each page asked for; None for a miss. They hold until the next call."""


class PageStore(Protocol):
    """One of both sides; pages go by their numbers."""

    sources: list[memoryview]
    """Memory of a batch of pages to be put."""

    @property
    def server(self) -> subprocess.Popen[str] | None:
        """The server that has the pages; None where this process has them."""
        ...

    def put(self, pages: Sequence[int]) -> None:
        """Put what ``sources`` hold; return when the store has it."""

    def get(self, pages: Sequence[int]) -> Found:
        """Return the bytes that the store has of some pages."""
        ...

    def exists(self, pages: Sequence[int]) -> int:
        """Return how many of some pages the store has."""
        ...


def digest_of(page: int) -> bytes:
    """Return the key of a page."""
    return hashlib.sha256(b"%d" % page).digest()


class StoreChild:
    """A store, and all that the parent asks of it."""

    def __init__(self, store: PageStore, root: Path, page_bytes: int, pages: int) -> None:
        self._store, self._root, self._page_bytes, self._pages = store, root, page_bytes, pages
        self._body = random.Random(7).randbytes(page_bytes)
        for source in store.sources:
            source[:] = self._body

    def turn(self, first: int) -> dict[str, float]:
        """Put, get in disorder and look up as many pages as it has, from ``first`` on; return rates, MB/s and us."""
        order = list(range(first, first + self._pages))
        megabytes, taken = self._pages * self._page_bytes / 1e6, {}
        batches = [order[start : start + BATCH_PAGES] for start in range(0, self._pages, BATCH_PAGES)]
        for name, call in (("put", self._put), ("get", self._get), ("exists", self._exists), ("one", self._exists)):
            processor_s, served_s, began_s = processor(), self._served_s(), time.perf_counter()
            for pages in batches if name != "one" else ([page] for page in order[:ONES]):
                call(pages)
            seconds = time.perf_counter() - began_s
            if name == "one":
                taken[name] = seconds / min(ONES, self._pages) * 1e6
            else:
                taken[name] = seconds / self._pages * 1e6 if name == "exists" else megabytes / seconds
            taken[f"{name}_s_per_gb"] = (processor() - processor_s) / megabytes * 1e3
            taken[f"{name}_served_s_per_gb"] = (self._served_s() - served_s) / megabytes * 1e3
            random.Random(first).shuffle(order)
            batches = [order[start : start + BATCH_PAGES] for start in range(0, self._pages, BATCH_PAGES)]
        return taken

    def _served_s(self) -> float:
        """Return the seconds that the threads of the server have computed."""
        if self._store.server is None:
            return 0.0
        threads = Path(f"/proc/{self._store.server.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def found(self, first: int) -> dict[str, int]:
        """Return how many pages are right, missed, and wrong."""
        counts = {"right": 0, "missed": 0, "wrong": 0}
        for start in range(first, first + self._pages, BATCH_PAGES):
            pages = range(start, start + BATCH_PAGES)
            for page, seen in zip(pages, self._store.get(pages), strict=True):
                right = (
                    seen is not None
                    and seen[:HEAD_BYTES] == head(page)
                    and seen[HEAD_BYTES:] == self._body[HEAD_BYTES:]
                )
                counts["missed" if seen is None else "right" if right else "wrong"] += 1
        return counts

    def flip(self, count: int) -> dict[str, int]:
        """Flip a bit in the body of ``count`` pages on disk, wherever it lies."""
        flipped = 0
        for file in sorted(path for path in self._root.rglob("*") if path.is_file()):
            for place in self._bodies(file):
                if flipped < count:
                    with file.open("r+b") as written:
                        written.seek(place)
                        byte = written.read(1)[0]
                        written.seek(place)
                        written.write(bytes([byte ^ 1]))
                    flipped += 1
        return {"flipped": flipped}

    def _bodies(self, file: Path) -> Iterator[int]:
        """Yield a place in the middle of every page that a file holds."""
        held, place = file.read_bytes(), -1
        while (place := held.find(self._body[64:128], place + 1)) >= 0:
            yield place + self._page_bytes // 2

    def _put(self, pages: Sequence[int]) -> None:
        for source, page in zip(self._store.sources, pages, strict=True):
            source[:HEAD_BYTES] = head(page)
        self._store.put(pages)

    def _get(self, pages: Sequence[int]) -> None:
        assert None not in self._store.get(pages)

    def _exists(self, pages: Sequence[int]) -> None:
        assert self._store.exists(pages) == len(pages)


def head(page: int) -> bytes:
    """Return what a page begins with, which tells it from others."""
    return page.to_bytes(HEAD_BYTES, "big")


def processor() -> float:
    """Return the seconds that this process has computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(store: PageStore, root: Path, page_bytes: int, pages: int) -> None:
    """Do as told until the input ends."""
    child = StoreChild(store, root, page_bytes, pages)
    asked: Mapping[str, Callable[[int], Mapping[str, float]]] = {
        "turn": child.turn,
        "found": child.found,
        "flip": child.flip,
    }
    try:
        for line in sys.stdin:
            name, number = line.split()
            sys.stdout.write(f"{json.dumps(asked[name](int(number)))}\n")
            sys.stdout.flush()
    finally:
        if store.server is not None:
            store.server.send_signal(signal.SIGTERM)
    os._exit(0)  # LMCache's threads wait for no end


def serve_beside(command: Sequence[str], port: int) -> subprocess.Popen[str]:
    """Start a server, on the core that this process is on, and wait until it listens."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    end_s = time.monotonic() + WAIT_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return server
        assert server.poll() is None, f"{command} has ended"
        assert time.monotonic() < end_s, f"{command} does not listen"
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
