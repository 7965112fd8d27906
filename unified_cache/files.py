"""Files that are either whole or not there."""

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["check_writable", "write_whole"]


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file under another name first and rename it: whoever looks sees all of it, or what was there before.

    Args:
        path: where; one thread at a time.
        content: what.
        mode: who may do what with the file, as ``open(2)`` takes it: less what the process's mask takes away.

    Raises:
        OSError: it cannot be written; nothing was left behind.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    draft.unlink(missing_ok=True)  # of a process that was killed, and had this number
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def check_writable(directory: Path) -> None:
    """Find out that files cannot be made in ``directory`` before there is something to lose.

    Raises:
        OSError: they cannot.
    """
    draft = directory / f".{os.getpid()}.part"
    draft.open("xb").close()
    draft.unlink()
