"""The console entry point: options in, one exit status out, and one line on standard error for any failure."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Literal, Protocol, runtime_checkable

import typer

from unified_cache.cli.commands import HELP_NAMES, command_line
from unified_cache.cli.text import printable
from unified_cache.core.errors import CacheError, InputError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT; as shells do."""
EXIT_BROKEN_PIPE = 141
"""128 and the number of SIGPIPE; as shells do."""

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="unified-cache",
    help="Prefix cache over device, host and storage for LLM serving engines.",
    context_settings={"help_option_names": HELP_NAMES},
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


LogLevel = Literal["debug", "info", "warning", "error"]
"""Least severe lines of the library's log that are shown."""


@runtime_checkable
class Command(Protocol):
    """A command with its options, ready to run."""

    def run(self) -> None:
        """Run the command; failures are raised."""
        ...


def _log_from(level: LogLevel | None) -> None:
    """Write the library's log to standard error, from a level on; without one, Python shows warnings alone."""
    if level is not None:
        shown = logging.StreamHandler(sys.stderr)
        shown.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("unified_cache")
        logger.handlers = [shown]
        logger.setLevel(level.upper())


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("unified-cache"))
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(callback=_log_from, help="Show the library's log on standard error, from this level on."),
    ] = None,
) -> None:
    """Prefix cache over device, host and storage for LLM serving engines."""


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit status: 0 done, 1 failed, 2 asked for what cannot be, 130 interrupted."""
    try:
        # A command is a value: the options as given. Options such as --help answer by themselves with a status.
        command: object = command_line(app).main(
            list(arguments) or ["--help"], prog_name="unified-cache", standalone_mode=False
        )
        if isinstance(command, Command):
            command.run()
        sys.stdout.flush()
    except typer.TyperException as error:
        text = error.format_message()
        return _refused(text, EXIT_USAGE) if text else EXIT_USAGE  # without a command the help was printed
    except InputError as error:
        return _refused(str(error), EXIT_USAGE)
    except CacheError as error:
        return _refused(str(error), EXIT_FAILURE)
    except BrokenPipeError:
        return _unread()
    except OSError as error:
        is_path_wrong = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError)
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _refused(text, EXIT_USAGE if is_path_wrong else EXIT_FAILURE)
    except MemoryError:
        return _refused("memory does not suffice", EXIT_FAILURE)
    except (KeyboardInterrupt, typer.Abort) as ended:
        return _interrupted(": ".join(("interrupted", *map(str, ended.args))))
    except SystemExit as ended:
        # Help is written by libraries that end with status 1 where its reader has gone.
        if isinstance(ended.__context__, BrokenPipeError):
            return _unread()
        raise
    except Exception as error:  # the edge: our bugs, and other people's code behind a store's URL
        logger.debug("the command ended by an error that nobody expected", exc_info=error)
        return _refused(_bug(error), EXIT_FAILURE)
    return command if isinstance(command, int) else 0


def _bug(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"a bug in unified-cache, or in the store that was named, please report it: {type(error).__name__}: {error} "
        f"({place.filename}, line {place.lineno}; --log-level debug shows how it came there)"
    )


def _unread() -> int:
    """Replace standard output, whose reader has gone: the interpreter would complain when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def _interrupted(text: str) -> int:
    """Print on a line of its own, after the ^C of a terminal, what a run had when it was interrupted."""
    newline = "\n" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{newline}{printable(text)}\n")
    return EXIT_INTERRUPTED


def _refused(reason: str, status: int) -> int:
    sys.stderr.write(f"error: {printable(' '.join(reason.split()))}\n")
    return status
