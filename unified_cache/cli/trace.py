"""``unified-cache trace``: figures of a trace, and parts and forms of it for other runs."""

import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import read_watched, watched
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.cli.text import example
from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import import_with_extra
from unified_cache.core.files import check_writable, write_whole
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest, is_of_lmcache
from unified_cache.sizing.replay.trace_figures import TraceFigures, page_of
from unified_cache.sizing.replay.trace_sessions import cut_sessions, in_blocks_of
from unified_cache.sizing.report.page import TableSection

if TYPE_CHECKING:
    from unified_cache.sizing.replay.lmcache_trace import LmcacheTrace

__all__ = ["TraceConvertCommand", "TraceCutCommand", "TraceInfoCommand", "trace_app"]

TRACE_EPILOG = """**Examples**

    unified-cache trace info recording.jsonl.gz --report out

    unified-cache trace cut recording.jsonl.gz part.jsonl.gz --share 0.1

    unified-cache trace convert recording.jsonl.gz mooncake.jsonl.gz

    unified-cache trace convert lmcache-trace.lct mooncake.jsonl.gz
"""

LMCACHE_CHUNK_TOKENS = 256
"""Tokens of a chunk, LMCache's default."""

trace_app = typer.Typer(
    name="trace",
    epilog=TRACE_EPILOG,
    help="Show figures of a request trace or a recording, cut it, and convert it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

TraceArgument = Annotated[Path, typer.Argument(help="Trace in the Mooncake format or recording, plain or .gz.")]
TargetArgument = Annotated[Path, typer.Argument(metavar="TARGET", help="File to write; gzip where it ends in .gz.")]


@dataclass(frozen=True, slots=True)
class TraceInfoCommand(JsonOptions):
    """Show how much of a trace repeats, how soon, how often, and in which sessions."""

    trace: TraceArgument
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page with pictures there.")] = None

    def run(self) -> None:
        """Count and show."""
        self.check_json_file()
        write_page = page_writer(self.report)
        requests = read_watched(self.trace)
        with watched(sys.stderr, "count", sum(len(each.hash_ids) for each in requests), "blocks") as on_progress:
            figures = TraceFigures.of(requests, on_progress)
        page = page_of(self.trace.name, figures)
        if not self.shown_as_json("trace info", figures.as_json()):
            print_page(replace(page, tables=[TableSection("", ("", self.trace.name), page.settings), *page.tables]))
        write_page(page)


@dataclass(frozen=True, slots=True)
class TraceCutCommand(JsonOptions):
    """Write some sessions of a trace, whole, into another file."""

    trace: TraceArgument
    target: TargetArgument
    share: Annotated[float, typer.Option(metavar="F", help="Share of the sessions, in (0, 1].")] = 1.0
    limit: Annotated[int | None, typer.Option(metavar="N", help="Of the trace's first N requests only.")] = None
    seed: Annotated[int, typer.Option(metavar="N", help="Choice of the sessions.")] = 0

    def run(self) -> None:
        """Choose and write."""
        check_writable(self.target.parent)
        requests = read_watched(self.trace, self.limit)
        chosen = cut_sessions(requests, self.share, self.seed)
        _write(self.target, chosen)
        value = {"target": str(self.target), "read_requests": len(requests), "requests": len(chosen)}
        if not self.shown_as_json("trace cut", value):
            sys.stdout.write(f"{len(chosen)} of {len(requests)} requests\n")


@dataclass(frozen=True, slots=True)
class TraceConvertCommand(JsonOptions):
    """Write a recording, ours or LMCache's, as a plain Mooncake trace: larger blocks, numbered from 0."""

    trace: Annotated[Path, typer.Argument(help="Recording, trace in the Mooncake format, or LMCache's .lct.")]
    target: TargetArgument
    block_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a block.")] = BLOCK_TOKENS
    chunk_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a chunk, which recordings of LMCache do not say.")
    ] = LMCACHE_CHUNK_TOKENS

    def run(self) -> None:
        """Convert and write."""
        check_writable(self.target.parent)
        requests = (
            _read_lmcache(self.trace, self.chunk_tokens) if is_of_lmcache(self.trace) else read_watched(self.trace)
        )
        converted = in_blocks_of(requests, self.block_tokens)
        _write(self.target, converted)
        value = {"target": str(self.target), "requests": len(converted), "block_tokens": self.block_tokens}
        if not self.shown_as_json("trace convert", value):
            sys.stdout.write(f"{len(converted)} requests in blocks of {self.block_tokens} tokens\n")


def _read_lmcache(path: Path, chunk_tokens: int) -> list[TraceRequest]:
    """Read the look-ups of a recording of LMCache, show how far it is, and say where it was cut off."""
    lmcache = import_with_extra("unified_cache.sizing.replay.lmcache_trace", "events", "reading a recording of LMCache")
    with watched(sys.stderr, "read", None, "requests") as on_progress:
        found: LmcacheTrace = lmcache.read_lmcache_trace(path, chunk_tokens, on_progress)
    if not found.is_whole:
        sys.stderr.write(f"{path} ends within a record: what came before it was read\n")
    return found.requests


def _write(target: Path, requests: Sequence[TraceRequest]) -> None:
    """Write requests in the Mooncake format; of blocks of another size than its own with their ``page_size``."""
    if not requests:
        raise ConfigError(f"{target} would be empty: no session was chosen")
    lines = "".join(json.dumps(_entry(request), separators=(",", ":")) + "\n" for request in requests).encode()
    write_whole(target, gzip.compress(lines, mtime=0) if target.suffix == ".gz" else lines)


def _entry(request: TraceRequest) -> dict[str, object]:
    entry: dict[str, object] = {
        "timestamp": request.timestamp,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": list(request.hash_ids),
    }
    return entry if request.block_tokens == BLOCK_TOKENS else {**entry, "page_size": request.block_tokens}


for _name, _command, _options in (
    ("info", TraceInfoCommand, " trace.jsonl.gz --report out"),
    ("cut", TraceCutCommand, " trace.jsonl.gz part.jsonl.gz --share 0.1"),
    ("convert", TraceConvertCommand, " recording.jsonl.gz mooncake.jsonl.gz"),
):
    trace_app.command(_name, epilog=example(f"unified-cache trace {_name}{_options}"))(_command)
