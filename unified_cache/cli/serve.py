"""``unified-cache serve`` and ``unified-cache token``: the service, and who may call it.

The service is imported when it begins: it needs the extra ``service``, which the other commands do not.
"""

import os
import secrets
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.text import example
from unified_cache.core.drain import Drain, signals_drain
from unified_cache.core.errors import CacheError, without_secrets
from unified_cache.core.extras import import_with_extra
from unified_cache.core.settings.loading import FILE_NAME, read_settings
from unified_cache.core.settings.service import Role, ServiceSettings
from unified_cache.core.sizes import size_text
from unified_cache.storage_backends.url import split_choice

SERVE_EPILOG = """**Examples**

A store of this machine, for this machine:

    unified-cache serve --storage file:kv-store --storage-bytes 500GiB

Everything from a file; see what it comes to:

    unified-cache config check --config service.toml --for serve --all

    unified-cache serve --config service.toml
"""

CALLERS_EPILOG = """**Examples**

    unified-cache token new --tokens tokens --tenant acme --role writer --days 90

    unified-cache token list --tokens tokens

    unified-cache token revoke --tokens tokens 1f0c5a9be2d34471
"""

GRPC_LOG = "GRPC_VERBOSITY"
"""Of gRPC's C core, which writes lines of its own kind on standard error, one for each handshake that fails."""

serve_app = typer.Typer(rich_markup_mode="markdown")
token_app = typer.Typer(
    name="token",
    epilog=CALLERS_EPILOG,
    help="Make and revoke the tokens that tenants of a service show.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

TokensOption = Annotated[Path, typer.Option("--tokens", metavar="FILE", help="File of hashed tokens.")]


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """Serve a store over gRPC, safe by default: to this machine alone, unless client certificates are asked for.

    Settings come from options, which win over UNIFIED_CACHE_... in the environment, and that over a TOML file.
    On SIGTERM calls in flight finish; a second one stops at once.
    """

    listen: Annotated[
        str | None, typer.Option(metavar="ADDR", help="HOST:PORT or unix:PATH. [default: 127.0.0.1:50051]")
    ] = None
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="Store (L3). [default: file:~/.cache/unified-cache]")
    ] = None
    storage_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Cap on the store, as du counts it. [default: its file system]")
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Settings in TOML. [default: {FILE_NAME}, where there is one]")
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without asking for client certificates.")
    ] = False

    def run(self) -> None:
        """Serve until a signal or an administrator ends it."""
        os.environ.setdefault(GRPC_LOG, "NONE")
        options = {"listen": self.listen, "storage": self.storage, "storage_bytes": self.storage_bytes}
        given: dict[str, object] = {name: value for name, value in options.items() if value is not None}
        if self.insecure:
            given["insecure"] = True
        settings = read_settings(ServiceSettings, self.config, given).settings
        _service_module("operations.process", "serve").keep_freed_memory()
        drain = Drain()
        log = _service_module("operations.logs", "serve").log_to(sys.stderr)
        with signals_drain(drain):
            service = _service_module("server", "serve").Service.open(settings, log, drain)
            log.event("serving", _serving(settings, service.port, service.metrics_port))
            drain.wait()
            log.event("draining", f"calls in flight have {settings.drain.grace_s} s")
            finished = service.drain(settings.drain.grace_s)
            log.event("stopped", "all calls finished" if finished else "calls were cut off")
        if not finished:
            raise CacheError(f"calls in flight must finish within {settings.drain.grace_s} s, found some that did not")


@dataclass(frozen=True, slots=True)
class TokenNewCommand:
    """Make a token: print it, this once, and append what the server needs to know of it to the file."""

    tokens: TokensOption
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant of the token.")]
    role: Annotated[Role, typer.Option(metavar="ROLE", help="reader, writer or admin.")] = Role.READER
    days: Annotated[int | None, typer.Option(min=0, max=36_500, help="Days until it expires. [default: never]")] = None

    def run(self) -> None:
        """Make, keep and print."""
        tokens, callers = _service_module("access.tokens", "token"), _service_module("access.callers", "token")
        last_day = None if self.days is None else (datetime.now(UTC) + timedelta(days=self.days)).date()
        caller = callers.Caller(self.tenant, self.role)
        token, entry = tokens.new_token(caller, last_day, secrets.token_bytes)
        tokens.add_token(self.tokens, entry)
        sys.stdout.write(f"{token}\n")


@dataclass(frozen=True, slots=True)
class TokenListCommand(JsonOptions):
    """List the tokens of a file: ID, tenant, role and last day."""

    tokens: TokensOption

    def run(self) -> None:
        """Read and print."""
        found = _service_module("access.tokens", "token").read_tokens(self.tokens).values()
        listed = [
            {
                "id": entry.token_id,
                "tenant": entry.caller.tenant,
                "role": entry.caller.role.value,
                "last_day": None if entry.last_day is None else str(entry.last_day),
            }
            for entry in found
        ]
        if self.shown_as_json("token list", {"tokens": listed}):
            return
        for each in listed:
            expires = each["last_day"] or "never"
            sys.stdout.write(f"{each['id']} {each['tenant']} {each['role']} {expires}\n")


@dataclass(frozen=True, slots=True)
class TokenRevokeCommand:
    """Take a token out of a file; servers notice within a second or so."""

    token_id: Annotated[str, typer.Argument(metavar="ID", help="The middle part of the token.")]
    tokens: TokensOption

    def run(self) -> None:
        """Replace the file."""
        _service_module("access.tokens", "token").remove_token(self.tokens, self.token_id)


def _serving(settings: ServiceSettings, port: int, metrics_port: int | None) -> str:
    """Return where the service listens, over which store, and what bounds it; keys and a plug-in's argument apart."""
    tls = "over TLS" if settings.tls is not None else "in plain text"
    if settings.tls is not None and settings.tls.client_ca is not None:
        tls += " with client certificates"
    bare, choice = split_choice(settings.storage)
    scheme, _, rest = bare.partition(":")
    if "." in scheme:
        rest = rest.partition(":")[0]
    store = without_secrets(f"{scheme}:{rest}") + (", compressed or encrypted" if choice is not None else "")
    cap, quota = (
        "none" if each is None else size_text(each)
        for each in (settings.storage_bytes, settings.quota.stored_bytes_max)
    )
    metrics, address = "none", settings.metrics_address
    if address is not None and metrics_port is not None:
        metrics = address.bound(metrics_port)
    where = settings.address.bound(port)
    return f"{where} {tls}; store {store}, its cap {cap}, quota of a tenant {quota}; metrics {metrics}"


def _service_module(name: str, command: str) -> ModuleType:
    """Import a part of the service for a command."""
    return import_with_extra(f"unified_cache.service.{name}", "service", command)


serve_app.command("serve", epilog=SERVE_EPILOG)(ServeCommand)
for _name, _command, _options in (
    ("new", TokenNewCommand, " --tenant acme --role writer --days 90"),
    ("list", TokenListCommand, ""),
    ("revoke", TokenRevokeCommand, " 1f0c5a9be2d34471"),
):
    token_app.command(_name, epilog=example(f"unified-cache token {_name} --tokens tokens{_options}"))(_command)
