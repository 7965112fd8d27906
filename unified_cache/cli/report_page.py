"""Pages that commands write with ``--report``: the directory is made and tried before a run, not after it."""

import sys
from collections.abc import Callable
from pathlib import Path

from unified_cache.extras import import_with_extra
from unified_cache.files import check_writable

__all__ = ["page_writer"]


def page_writer(directory: Path | None, module: str) -> Callable[..., None]:
    """Return what writes the page that ``module`` makes of a result, and names it; nothing for no directory.

    The module is imported here, since a page needs the extra ``report``; its ``page_of`` takes what is written.

    Raises:
        MissingExtraError: the extra is not installed.
        OSError: the directory cannot be made or written.
    """
    if directory is None:
        return lambda *_: None
    page_of = import_with_extra(module, "report", "--report").page_of
    directory.mkdir(parents=True, exist_ok=True)
    check_writable(directory)

    def write(*result: object) -> None:
        sys.stderr.write(f"report: {page_of(*result).write(directory)}\n")

    return write
