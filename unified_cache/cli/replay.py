"""``unified-cache replay``: options to settings, the run, and what is shown of it.

The runner and the report are imported when a run begins: they bring torch and matplotlib, and neither help nor a
refused option should wait for those.
"""

import json
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unified_cache.cli.progress import progress_on
from unified_cache.cli.table import print_result
from unified_cache.errors import CacheError, ConfigError
from unified_cache.replay.files import check_writable, write_whole
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.trace import read_trace

if TYPE_CHECKING:
    from types import ModuleType

    from unified_cache.replay.result import ReplayResult

__all__ = ["ReplayCommand", "parse_bytes"]

STDOUT = "-"

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def parse_bytes(option: str, text: str) -> int:
    """Read a number of bytes: 4096, 64KiB, 500MB, 1.5GiB; KiB counts 1024, KB 1000.

    Raises:
        ConfigError: it is none; the message names ``option``.

    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} must be bytes as in 4096, 500MB or 4GiB, found {text!r}")
    number, unit, binary = found.groups()
    scale = (1024 if binary else 1000) ** _UNITS[unit.upper()]
    return int(number) * scale if number.isdecimal() else int(float(number) * scale)


@dataclass(frozen=True, slots=True)
class ReplayCommand:
    """Replay a request trace against a cache of given tier sizes and say what it would have hit.

    Payloads are made from page keys, written to device pages as an engine would, and every page handed back, from
    any tier, is compared byte for byte. One request at a time: a run depends on trace and sizes alone.
    """

    trace: Annotated[Path, typer.Argument(help="Request trace in the Mooncake format, plain or .gz.")]
    page_size: Annotated[int, typer.Option(help="Tokens per page; must divide 512.")] = 512
    device_pages: Annotated[int, typer.Option(help="Pages that the device can cache (L1).")] = 2000
    host_pages: Annotated[int, typer.Option(help="Pages that host memory can cache (L2); 0 for no L2.")] = 20000
    storage: Annotated[str | None, typer.Option(metavar="URL", help="Store (L3): memory: or file:DIR.")] = None
    storage_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Cap on the store, as in 500MB or 4GiB.")
    ] = None
    page_bytes: Annotated[str, typer.Option(metavar="BYTES", help="Payload of one page, as in 4096 or 1MiB.")] = "4KiB"
    limit: Annotated[int | None, typer.Option(help="Replay the trace's first N requests only.", metavar="N")] = None
    no_bytes: Annotated[
        bool, typer.Option("--no-bytes", help="Move and verify no payloads: the same hits at full speed, for sizing.")
    ] = False
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a page and a picture of hits over time there.")
    ] = None
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for standard output.")
    ] = None

    def run(self) -> None:
        """Replay and show the result.

        Raises:
            InputError: settings or trace cannot be used; nothing was touched.
            CacheError: storage failed, or the cache handed back wrong bytes or lost slots.
            OSError: report or JSON file cannot be written.

        """
        settings = ReplaySettings(
            page_size=self.page_size,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            storage=self.storage,
            storage_bytes=None if self.storage_bytes is None else parse_bytes("--storage-bytes", self.storage_bytes),
            page_bytes=parse_bytes("--page-bytes", self.page_bytes),
            with_bytes=not self.no_bytes,
        )
        requests = read_trace(self.trace, self.limit)
        report = None if self.report is None else _report_module()
        if self.report is not None:
            self.report.mkdir(parents=True, exist_ok=True)
            check_writable(self.report)
        if self.json_file not in (None, STDOUT):
            check_writable(Path(self.json_file).parent)
        runner = import_module("unified_cache.replay.runner")
        with progress_on(sys.stderr, len(requests)) as watch:
            result: ReplayResult = runner.replay(self.trace.name, requests, settings, watch)
        self._show(result, report)
        if result.wrong_pages or result.leaked_slots:
            raise CacheError(
                f"{result.wrong_pages} of {result.pages_verified} pages handed back held wrong bytes, "
                f"{result.leaked_slots} slots leaked; this is a bug, please report it"
            )

    def _show(self, result: "ReplayResult", report: "ModuleType | None") -> None:
        text = json.dumps(result.as_json(), indent=2) + "\n"
        if self.json_file == STDOUT:
            sys.stdout.write(text)
        else:
            print_result(sys.stdout, result)
        if self.json_file not in (None, STDOUT):
            write_whole(Path(self.json_file), text.encode())
        if report is not None and self.report is not None:
            page: Path = report.write_report(result, self.report)
            sys.stderr.write(f"report: {page}\n")


def _report_module() -> "ModuleType":
    """Import the report before the run, not after it.

    Raises:
        ConfigError: what draws it is not installed.

    """
    try:
        return import_module("unified_cache.replay.report")
    except ImportError as error:
        raise ConfigError(
            f"--report needs {error.name}, which is not installed: pip install 'unified-cache[report]'"
        ) from error
