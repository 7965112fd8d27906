"""Traces as commands read them: with a bar on a terminal."""

import sys
from pathlib import Path

from unified_cache.cli.progress import watched
from unified_cache.replay.trace import TraceRequest, read_trace

__all__ = ["read_watched"]


def read_watched(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, or its first ``limit`` requests, and show how far it is.

    Raises:
        TraceError: it is no trace.
        ConfigError: the limit is not positive.
    """
    with watched(sys.stderr, "read", limit, "requests") as tell:
        return read_trace(path, limit, tell)
