"""``unified-cache samples``: what comes with the package to try it with, copied to where it can be read and changed."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import unified_cache
from unified_cache.cli.text import console_on
from unified_cache.core.errors import ConfigError

SAMPLES = ("dashboards", "deploy", "examples", "traces/README.md", "traces/mooncake_conversation_1000.jsonl.gz")
"""Files and directories of a checkout's root that an installed package has in ``samples``."""

SAMPLES_EPILOG = """**Examples**

    unified-cache samples

    unified-cache samples to/try && cd to/try && unified-cache replay traces/mooncake_conversation_1000.jsonl.gz
"""

samples_app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class SamplesCommand:
    """Copy a trace of 1,000 requests, the examples, and what deploys and watches a service into a directory.

    They come with the package. Nothing that is there already is replaced.
    """

    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; made if absent.")] = Path()

    def run(self) -> None:
        """Copy and list."""
        source = samples_directory()
        files = [file for name in SAMPLES for file in files_at(source / name)]
        targets = {file: self.directory / file.relative_to(source) for file in files}
        taken = [str(target) for target in targets.values() if target.exists()]
        if taken:
            raise ConfigError(f"samples must not replace files, found {', '.join(taken)}; name another directory")
        for file, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            console_on(sys.stdout).print_line(str(target))


def samples_directory() -> Path:
    """Return where the samples of this installation are: in the package, or at the root of a checkout."""
    package = Path(unified_cache.__file__).parent
    installed = package / "samples"
    return installed if installed.is_dir() else package.parent


def files_at(path: Path) -> list[Path]:
    """List a file, or the files in a directory but for what Python compiled."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


samples_app.command("samples", epilog=SAMPLES_EPILOG)(SamplesCommand)
