"""The log of the Mooncake library: silent, or handed line by line to our logger where it shows debug lines.

To the library a page that is not there is an error, so a cache in good order would write thousands of lines on standard
error. Where our logger shows debug lines, the library writes files of its own instead, in a private directory, and a
thread of ours reads what was added and logs it. It cannot call our logger: it holds a lock of its own while it logs,
also where its caller holds the interpreter's, so a function of Python there would stop the process. Nor is there a pipe
in the place of standard error: the last words of a process that dies, the library's fatal ones among them, go there.

What the operator has set (``MC_LOG_LEVEL``, ``MC_LOG_DIR``) holds.
"""

import atexit
import ctypes
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path
from threading import Event, Lock, Thread

__all__ = ["ERRORS_ONLY", "LEVEL", "LOG_FILE_BYTES_MAX", "LogFiles", "direct_own_log"]

logger = logging.getLogger(__name__)

LEVEL = "MC_LOG_LEVEL"
DIRECTORY = "MC_LOG_DIR"
"""Variables by which an operator tells the library what to log, and where."""

ERRORS_ONLY = "ERROR"
"""What we set ``MC_LOG_LEVEL`` to where the operator has not."""

LOG_FILE_BYTES_MAX = 16 << 20
"""The library then begins another file. Two in one second would have one name, so this is more than it logs in one."""

FILES_MAX = 2
"""Where more wait to be read, the older ones are left out, so that the log has a bound."""

READ_BYTES = 1 << 20
"""Read at a time."""

LOOK_S = 0.25
"""Pause between two looks at what was added."""

END_S = 2.0
"""Wait for the thread when the process ends."""

_FATAL = 3
"""Severity of glog, the library's logger, after which the process ends; 0 to 2 are infos, warnings and errors."""

_PROGRAM = b"mooncake"
"""Name under which glog logs. It keeps the pointer, so these bytes stay."""

_RECORD = re.compile(rb"[IWEF]\d{4} ")
"""What the first line of a record begins with: severity, month and day. A file's own heading does not."""


class LogFiles:
    """The files that glog writes in a directory for this process, read as they grow. Thread-safe.

    Each whole line goes to ``take``, once and in order. A file that is read to its end and has a successor is removed.
    """

    def __init__(self, directory: Path, take: Callable[[str], None], files_max: int = FILES_MAX) -> None:
        self._directory = directory
        self._take = take
        self._files_max = files_max
        self._suffix = f".{os.getpid()}"
        self._current: Path | None = None
        self._at = 0
        self._is_in_heading = True
        self._guard = Lock()

    @property
    def base(self) -> Path:
        """What the names of files begin with; glog adds a time and the process."""
        return self._directory / "mooncake."

    def read(self) -> None:
        """Hand over the lines that were added."""
        with self._guard, suppress(OSError):  # a file system that fails costs lines of a log, and nothing else
            self._read()

    def remove(self) -> None:
        """Hand over what is left, a line without an end too, and remove the directory."""
        with self._guard, suppress(OSError):
            self._read(is_last=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _read(self, *, is_last: bool = False) -> None:
        # A process that was forked off writes files of its own, with its number, which nobody reads.
        paths = sorted(path for path in self._directory.iterdir() if path.suffix == self._suffix)
        for path in paths[: -self._files_max]:
            left_out = path.stat().st_size - (self._at if path == self._current else 0)
            path.unlink()
            self._take(f"{left_out} bytes of its log were left out, since it logs faster than this logger takes")
        paths = paths[-self._files_max :]
        for path in paths:
            if path != self._current:
                self._current, self._at, self._is_in_heading = path, 0, True
            is_whole = is_last or path != paths[-1]
            self._read_on(path, is_whole=is_whole)
            if path != paths[-1]:
                path.unlink()

    def _read_on(self, path: Path, *, is_whole: bool) -> None:
        """Hand over lines from where reading stopped; the rest after the last line's end, too, if the file is whole."""
        with path.open("rb") as file:
            file.seek(self._at)
            rest = b""
            while added := file.read(READ_BYTES):
                *lines, rest = (rest + added).split(b"\n")
                self._at += len(added)
                self._take_all(lines)
        if is_whole:
            self._take_all([rest] if rest else [])
        else:
            self._at -= len(rest)

    def _take_all(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._is_in_heading = self._is_in_heading and not _RECORD.match(line)
            if not self._is_in_heading:
                self._take(line.decode(errors="replace"))


class _Glog:
    """The library's logger, in this process."""

    def __init__(self, libraries: Iterable[ctypes.CDLL]) -> None:
        self._libraries = list(libraries)

    @classmethod
    def loaded(cls) -> "_Glog":
        """Find it; the two wheels name it differently."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        return cls(
            ctypes.CDLL(path)
            for path in {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libglog" in line}
        )

    def silence(self) -> None:
        """Log nothing but what is fatal."""
        self._set(minloglevel=_FATAL)

    def write_to(self, base: Path) -> None:
        """Log to files whose names begin so, each line at once, and on standard error what is fatal alone."""
        for library in self._libraries:
            with suppress(AttributeError):  # another build of it
                begin = library["_ZN6google17InitGoogleLoggingEPKc"]
                has_begun = library["_ZN6google24glog_internal_namespace_26IsGoogleLoggingInitializedEv"]
                name_files = library["_ZN6google17SetLogDestinationEiPKc"]
                link_files = library["_ZN6google13SetLogSymlinkEiPKc"]
                has_begun.restype = ctypes.c_bool
                if not has_begun():  # until then all lines go to standard error; a second time is fatal
                    begin(_PROGRAM)
                for severity in range(_FATAL + 1):
                    link_files(ctypes.c_int(severity), b"")
                    # The file of a severity has the records of those above it as well.
                    name_files(ctypes.c_int(severity), b"" if severity else os.fsencode(base))
        self._set(max_log_size=LOG_FILE_BYTES_MAX >> 20, logbuflevel=-1, stderrthreshold=_FATAL)
        self._switch_off("logtostderr", "alsologtostderr")

    def _set(self, **flags: int) -> None:
        for library, (flag, value) in product(self._libraries, flags.items()):
            with suppress(ValueError):  # another build of it, which goes on as it is
                ctypes.c_int.in_dll(library, _symbol("fLI", flag)).value = value

    def _switch_off(self, *flags: str) -> None:
        for library, flag in product(self._libraries, flags):
            with suppress(ValueError):  # as above
                ctypes.c_bool.in_dll(library, _symbol("fLB", flag)).value = False


def _symbol(space: str, flag: str) -> str:
    """Return the name that C++ gives a flag of glog."""
    name = f"FLAGS_{flag}"
    return f"_ZN{len(space)}{space}{len(name)}{name}E"


class _FollowedLog:
    """The library's log on its way to our logger, until the process ends."""

    def __init__(self, files: LogFiles, glog: _Glog) -> None:
        self.files = files
        self._glog = glog
        self._pid = os.getpid()
        self._is_ending = Event()
        self._thread = Thread(target=self._follow, name="mooncake-log", daemon=True)

    @classmethod
    def started(cls, glog: _Glog) -> "_FollowedLog":
        """Make the directory and begin to read; it ends with the process."""
        directory = Path(tempfile.mkdtemp(prefix="unified-cache-mooncake-log-"))
        log = cls(LogFiles(directory, lambda line: logger.debug("%s", line)), glog)
        atexit.register(log.end)
        log._thread.start()
        return log

    def end(self) -> None:
        """Hand over what is left, and leave nothing behind."""
        if os.getpid() != self._pid:
            return
        self._glog.silence()
        self._is_ending.set()
        self._thread.join(END_S)
        self.files.remove()

    def _follow(self) -> None:
        while not self._is_ending.wait(LOOK_S):
            self.files.read()


class _OwnLog:
    """The library's log in this process."""

    def __init__(self) -> None:
        self._followed: _FollowedLog | None = None
        self._guard = Lock()

    def direct(self) -> None:
        if DIRECTORY in os.environ:
            return
        glog = _Glog.loaded()
        if logger.isEnabledFor(logging.DEBUG):
            try:
                with self._guard:
                    if self._followed is None:
                        self._followed = _FollowedLog.started(glog)
            except OSError as error:
                logger.debug("the library logs to standard error, since it can have no files of its own: %s", error)
            else:
                glog.write_to(self._followed.files.base)
        elif os.environ.get(LEVEL, ERRORS_ONLY) == ERRORS_ONLY:
            glog.silence()


_OWN_LOG = _OwnLog()


def direct_own_log() -> None:
    """Silence the library's log, or have it come to our logger until the process ends, as the module says.

    To be called again after the library has read its settings.
    """
    _OWN_LOG.direct()
