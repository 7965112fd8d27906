"""The console entry point: options in, one exit status out, and one line on standard error for any failure."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Protocol, runtime_checkable

import typer

from unified_cache.cli.backup import BackupCommand, PrefetchCommand
from unified_cache.cli.cluster import cluster_app
from unified_cache.cli.conformance import ConformanceCommand
from unified_cache.cli.demo import DEMO_EPILOG, DemoCommand
from unified_cache.cli.layout import layout
from unified_cache.cli.node import NodeCommand
from unified_cache.cli.remote import REMOTE_COMMANDS
from unified_cache.cli.replay import ReplayCommand
from unified_cache.cli.router import router_app
from unified_cache.cli.serve import SERVE_EPILOG, ServeCommand, token_app
from unified_cache.cli.storage import storage_app
from unified_cache.cli.text import example, printable
from unified_cache.errors import CacheError, InputError

__all__ = ["Command", "app", "main", "run"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT; as shells do."""
EXIT_BROKEN_PIPE = 141
"""128 and the number of SIGPIPE; as shells do."""

REPLAY_EPILOG = """**Examples**

What would an L1 of 50,000 pages hit? No payload moves:

    unified-cache replay trace.jsonl.gz --device-pages 50000 --host-pages 0 --no-bytes

Three tiers, every byte verified, and a page to look at:

    unified-cache replay trace.jsonl.gz --storage file:/tmp/kv --report out

All pools of a model, tiers in the bytes they would take:

    unified-cache replay trace.jsonl.gz --model deepseek-v4-flash --device-bytes 40GiB --host-bytes 500GiB
"""

LAYOUT_EPILOG = """**Examples**

    unified-cache layout deepseek-v4-flash

    unified-cache layout path/to/config.json --page-size 64 --json
"""

BACKUP_EPILOG = """**Examples**

Everything that a store holds, then again what was added since:

    unified-cache backup file:/var/cache/kv file:/mnt/backup/kv

The system prompts of one tenant:

    unified-cache backup file:kv file:seed --prefix prompts.jsonl --tenant acme
"""

PREFETCH_EPILOG = """**Examples**

    unified-cache prefetch file:/mnt/backup/kv --into file:/var/cache/kv --tokens prompt.json

    unified-cache prefetch file:seed --into my_stores.redis:connect:cache-1 --tokens prompts.jsonl --json
"""

CONFORMANCE_EPILOG = """**Examples**

    unified-cache conformance my_stores.redis:connect --bytes-max 1MiB

    unified-cache conformance file:/tmp/scratch
"""

NODE_EPILOG = """**Examples**

    unified-cache node --master 10.0.0.1:50051 --segment-bytes 64GiB

    unified-cache node --master cache-master:50051 --segment-bytes 64GiB --host cache-1 --wait-s 60
"""

app = typer.Typer(
    name="unified-cache",
    help="Prefix cache over device, host and storage for LLM serving engines.",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("replay", epilog=REPLAY_EPILOG)(ReplayCommand)
app.command("demo", epilog=DEMO_EPILOG)(DemoCommand)
app.command("layout", epilog=LAYOUT_EPILOG)(layout)
app.add_typer(storage_app)
app.command("backup", epilog=BACKUP_EPILOG)(BackupCommand)
app.command("prefetch", epilog=PREFETCH_EPILOG)(PrefetchCommand)
app.command("conformance", epilog=CONFORMANCE_EPILOG)(ConformanceCommand)
app.command("serve", epilog=SERVE_EPILOG)(ServeCommand)
app.add_typer(token_app)
for _name, (_command, _arguments) in REMOTE_COMMANDS.items():
    _line = f"unified-cache {_name} grpc://127.0.0.1:50051{_arguments}"
    app.command(_name, epilog=example(_line))(_command)
app.add_typer(cluster_app)
app.add_typer(router_app)
app.command("node", epilog=NODE_EPILOG)(NodeCommand)


@runtime_checkable
class Command(Protocol):
    """A command with its options, ready to run."""

    def run(self) -> None:
        """Run the command; failures are raised."""
        ...


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("unified-cache"))
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Prefix cache over device, host and storage for LLM serving engines."""


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit status: 0 done, 1 failed, 2 asked for what cannot be, 130 interrupted."""
    try:
        # A command is a value: the options as given. Options such as --help answer by themselves with a status.
        command: object = app(list(arguments) or ["--help"], prog_name="unified-cache", standalone_mode=False)
        if isinstance(command, Command):
            command.run()
        sys.stdout.flush()
    except typer.TyperException as error:
        return _refused(error.format_message(), EXIT_USAGE)
    except InputError as error:
        return _refused(str(error), EXIT_USAGE)
    except CacheError as error:
        return _refused(str(error), EXIT_FAILURE)
    except BrokenPipeError:
        # Whoever read our output has gone; without this, the interpreter complains when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return _refused(f"{error.filename}: {error.strerror}" if error.filename else str(error), EXIT_FAILURE)
    except MemoryError:
        return _refused("memory does not suffice", EXIT_FAILURE)
    except AssertionError as error:
        return _refused(f"a bug in unified-cache, please report it: {error}", EXIT_FAILURE)
    except (KeyboardInterrupt, typer.Abort):
        return _refused("interrupted", EXIT_INTERRUPTED)
    return command if isinstance(command, int) else 0


def _refused(reason: str, status: int) -> int:
    sys.stderr.write(f"error: {printable(' '.join(reason.split()))}\n")
    return status
