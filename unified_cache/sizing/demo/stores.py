"""Stores of the demo and all its processes, which are gone when it ends."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree, which
from tempfile import mkdtemp
from types import FrameType
from urllib.request import ProxyHandler, build_opener

from unified_cache.core.errors import CacheError, StorageError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.storage_backends.mooncake.native import METADATA, usable_wheel
from unified_cache.storage_backends.url import check_storage_url

__all__ = ["DemoStore", "Grounds", "end", "flip_byte", "open_store"]

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which the demo cleans up and ends."""
START_S = 60.0
"""Longest wait for a server; an idle machine needs 2 s."""
LOOK_S = 0.1
SERVE = "from unified_cache.cli.main import main; main()"
SEGMENT = "2GB"
"""Memory of the Mooncake node; the kernel gives it when it is written."""
MAGIC = b"UKVP"
KEY_OFFSET = 48
"""Of the key in a page's header; see ``unified_cache.core.seal``."""


class Grounds:
    """A temporary directory and processes that are gone at the end of the ``with`` block, whatever ends it.

    A signal raises KeyboardInterrupt, but never between the start of a process and the note that it was started, and
    never while all is being removed.
    """

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._is_held = False
        self._was_interrupted = False
        self.directory = Path()

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator["Grounds"]:
        """Make the directory."""
        grounds = cls()
        before = {number: signal.signal(number, grounds._interrupt) for number in ENDINGS}
        try:
            with grounds._held():
                grounds.directory = Path(mkdtemp(prefix="unified-cache-demo-"))
                grounds._ends.callback(rmtree, grounds.directory, ignore_errors=True)
            yield grounds
        finally:
            grounds._is_held = True
            grounds._ends.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, name: str, command: Sequence[str], *, is_piped: bool = False) -> subprocess.Popen[str]:
        """Start a process out of reach of the terminal's Ctrl-C; it is killed in the end. Its errors go to a log."""
        tied = ["setpriv", "--pdeathsig", "KILL"] if which("setpriv") else []
        pipe = subprocess.PIPE if is_piped else subprocess.DEVNULL
        with self._held(), self.log(name).open("ab") as log:
            process = subprocess.Popen(  # noqa: S603  # ours to run
                [*tied, *command], stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1, start_new_session=True
            )
            self._ends.callback(end, process)
        return process

    def log(self, name: str) -> Path:
        """Return where the errors of a process go."""
        return self.directory / f"{name}.log"

    def wait_for(self, name: str, process: subprocess.Popen[str], is_there: Callable[[], bool]) -> None:
        """Wait until a process that was started does what it is there for.

        Raises:
            StorageError: it ended, or took too long.
        """
        deadline_s = time.monotonic() + START_S
        while not is_there():
            if process.poll() is not None or time.monotonic() > deadline_s:
                text = f"{name} must start within {START_S:.0f} s, found: {self.last_line(name)}"
                raise StorageError(text, retryable=False)
            time.sleep(LOOK_S)

    def last_line(self, name: str) -> str:
        """Return the last line of a process's log."""
        lines = self.log(name).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "nothing in its log")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._is_held:
            raise KeyboardInterrupt
        self._was_interrupted = True

    @contextmanager
    def _held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._was_interrupted:
            raise KeyboardInterrupt


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and wait for its end; one that has ended stays so."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


@dataclass(frozen=True, slots=True)
class DemoStore:
    """A store that is there."""

    url: str
    pages: Path | None
    """Directory of its pages where the demo may damage one; None where it may or can not."""
    why_not: str = ""
    """Why none may be damaged."""


def open_store(grounds: Grounds, name: str) -> DemoStore:
    """Return the store ``file``, ``packed``, ``grpc`` or ``mooncake`` of the demo, or the user's at a URL.

    Raises:
        ConfigError: there is no such store, or Mooncake is not installed.
        StorageError: its server did not start.
    """
    pages = grounds.directory / "pages"
    match name.rstrip(":/"):
        case "file" | "packed" as scheme:
            return DemoStore(f"{scheme}:{pages}", pages)
        case "grpc":
            return DemoStore(start_service(grounds, pages), pages)
        case "mooncake":
            return DemoStore(
                start_mooncake(grounds), None, "pages of a Mooncake cluster lie in the memory of its nodes"
            )
    check_storage_url(name)
    return DemoStore(name, None, "the store is yours")


def start_service(grounds: Grounds, directory: Path) -> str:
    """Start a service over a directory; return its URL."""
    port, metrics = free_ports(2)
    listen = ("--listen", f"127.0.0.1:{port}", "--set", f"metrics.listen=127.0.0.1:{metrics}")
    command = (sys.executable, "-c", SERVE, "serve", *listen, "--storage", f"file:{directory}")
    server = grounds.start("service", command)
    grounds.wait_for("service", server, lambda: '"serving"' in grounds.log("service").read_text(encoding="utf-8"))
    return f"grpc://127.0.0.1:{port}"


def start_mooncake(grounds: Grounds) -> str:
    """Start a Mooncake master and one node; return the cluster's URL."""
    programs = Path(str(usable_wheel().locate_file("mooncake")))
    rpc, metrics, node_port = free_ports(3)
    master_command = (
        str(programs / "mooncake_master"),
        *("--rpc_address=127.0.0.1", f"--rpc_port={rpc}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"),
        *("--logtostderr=true", "--minloglevel=1", "--enable_metric_reporting=false", "--client_ttl=10"),
    )
    node_command = (
        str(programs / "mooncake_client"),
        *(f"--master_server_address=127.0.0.1:{rpc}", f"--metadata_server={METADATA}"),
        *("--host=127.0.0.1", f"--port={node_port}", f"--global_segment_size={SEGMENT}"),
    )
    admin = f"http://127.0.0.1:{metrics}"
    master = grounds.start("master", master_command)
    grounds.wait_for("master", master, lambda: b'"service_ready":true' in answer_of(f"{admin}/health"))
    node = grounds.start("node", node_command)
    grounds.wait_for("node", node, lambda: bool(answer_of(f"{admin}/get_all_segments").strip()))
    return f"mooncake://127.0.0.1:{rpc}?admin=127.0.0.1:{metrics}"


def flip_byte(directory: Path, key: bytes) -> Path:
    """Flip the first byte of the payload of a page in the files below ``directory``; return the file.

    Raises:
        CacheError: no page with bytes has that key.
    """
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        content = path.read_bytes()
        at = content.find(key)
        while at >= 0:
            start = at - KEY_OFFSET
            if content[start : start + 4] == MAGIC and content[start + 8 : start + 16] != bytes(8):
                with path.open("r+b") as file:
                    file.seek(start + HEADER_BYTES)
                    file.write(bytes([content[start + HEADER_BYTES] ^ 1]))
                return path
            at = content.find(key, at + 1)
    raise CacheError(f"a page of key {key.hex()} must be below {directory}, found none")


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that no process has at this moment."""
    with ExitStack() as holders:
        sockets = [holders.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answer_of(url: str) -> bytes:
    """Return what a server answers; nothing where there is none yet."""
    try:
        # Not by a proxy of the environment: it is on this machine.
        with build_opener(ProxyHandler({})).open(url, timeout=1) as answer:
            return bytes(answer.read())
    except OSError:
        return b""
