"""Figures of a command as JSON: on standard output in place of its tables, in a file beside them, or both.

Every value is an object that begins with ``command`` and ``format``; docs/json.md says what follows, by command.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from unified_cache.files import check_writable, write_whole

__all__ = ["JSON_FORMAT", "check_json_file", "shown_as_json"]

JSON_FORMAT = 1
"""Raised when a field that was there means something else, or is there no more; new fields do not raise it."""


def shown_as_json(command: str, value: Mapping[str, object], *, on_stdout: bool, file: Path | None) -> bool:
    """Write a command's figures to a file, if one is named; print them too, if asked, and tell whether that was done.

    Raises:
        OSError: the file cannot be written. It is as it was.
    """
    text = json.dumps({"command": command, "format": JSON_FORMAT, **value}, indent=2) + "\n"
    if file is not None:
        write_whole(file, text.encode())
    if on_stdout:
        sys.stdout.write(text)
    return on_stdout


def check_json_file(file: Path | None) -> None:
    """Refuse a file that could not be written, before the work that it is to hold.

    Raises:
        OSError: its directory is missing or cannot be written.
    """
    if file is not None:
        check_writable(file.parent)
