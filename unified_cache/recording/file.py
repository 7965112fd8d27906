"""Lines in gzip, in a file that is rotated: the newest under its own name, older ones numbered, the oldest removed."""

import gzip
import os
from pathlib import Path

from unified_cache.errors import ConfigError

__all__ = ["OWNER_ALONE", "RotatedFile"]

OWNER_ALONE = 0o600
"""Mode of a file."""

_LEVEL = 6


class RotatedFile:
    """A file of gzip members, one for each append, so that it is whole after each. For one thread.

    ``trace.jsonl.gz`` becomes ``trace.1.jsonl.gz`` once it has ``file_bytes_max``, that one ``trace.2.jsonl.gz``, and
    so on; of ``files_max`` files the last one is removed.
    """

    __slots__ = ("_file_bytes_max", "_files_max", "_path")

    def __init__(self, path: Path, file_bytes_max: int, files_max: int) -> None:
        """Take the newest file's place; nothing is written yet.

        Raises:
            ConfigError: the name does not end in .gz, a bound is not positive, or there is no such directory.
        """
        if path.suffix != ".gz":
            raise ConfigError(f"a recording is a file NAME.gz, as in trace.jsonl.gz, found {path.name}")
        if file_bytes_max < 1 or files_max < 1:
            raise ConfigError(
                f"a recording needs at least one file of at least one byte, found {files_max} of {file_bytes_max}"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"a recording needs a directory that is there, found none at {path.parent}")
        self._path = path
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max

    def append(self, lines: bytes) -> None:
        """Write lines, and rotate once the file is large enough.

        Raises:
            OSError: they cannot be written; what was written before stays readable.
        """
        member = gzip.compress(lines, _LEVEL, mtime=0)
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ALONE), "ab") as file:
            start = os.fstat(file.fileno()).st_size
            try:
                file.write(member)
                file.flush()
            except OSError:
                file.truncate(start)
                raise
            end = os.fstat(file.fileno()).st_size
        if end >= self._file_bytes_max:
            self._rotate()

    def files(self) -> list[Path]:
        """Return the files that there are, the newest first."""
        return [path for path in (self._numbered(number) for number in range(self._files_max)) if path.exists()]

    def _rotate(self) -> None:
        self._numbered(self._files_max - 1).unlink(missing_ok=True)
        for number in reversed(range(self._files_max - 1)):
            path = self._numbered(number)
            if path.exists():
                path.replace(self._numbered(number + 1))

    def _numbered(self, number: int) -> Path:
        if not number:
            return self._path
        stem, dot, suffixes = self._path.name.partition(".")
        return self._path.with_name(f"{stem}.{number}{dot}{suffixes}")
