"""``unified-cache ping`` and ``drain``: the servers of a service asked by a person.

A service is a store too: ``storage``, ``explain``, ``backup`` and ``prefetch`` take its URL. Its client is imported
when it is needed: it brings gRPC, an extra.
"""

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.text import console_on, example
from unified_cache.core.extras import import_with_extra
from unified_cache.core.sizes import size_text
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call

if TYPE_CHECKING:
    from unified_cache.storage_backends.remote.server import Server

remote_app = typer.Typer(rich_markup_mode="markdown")

ServiceArgument = Annotated[str, typer.Argument(metavar="URL", help="Service: grpc://HOST:PORT or grpcs://HOST:PORT.")]


@dataclass(frozen=True, slots=True)
class PingCommand(JsonOptions):
    """Ask every server of a service whether it answers, your tenant, what it holds for you, and how fast."""

    url: ServiceArgument

    def run(self) -> None:
        """Ask and show."""
        with _connected(self.url) as servers:
            answers = [(server.name, *_asked(server)) for server in servers]
        value = [
            {
                "server": server,
                "tenant": hello.tenant,
                "store": hello.store,
                "durable": hello.durable,
                "stored_bytes": hello.stored_bytes,
                "identities": hello.identities_count,
                "seconds": seconds,
            }
            for server, hello, seconds in answers
        ]
        if self.shown_as_json("ping", {"servers": value}):
            return
        rows = (
            (
                *(server, hello.tenant, hello.store, "yes" if hello.durable else "no"),
                *(size_text(hello.stored_bytes), f"{hello.identities_count:,}", f"{seconds * 1000:.1f}"),
            )
            for server, hello, seconds in answers
        )
        headings = ("server", "tenant", "store", "durable", "stored", "identities", "ms")
        console_on(sys.stdout).print_table(headings, rows, left=4)


@dataclass(frozen=True, slots=True)
class DrainCommand:
    """End a service as SIGTERM does: its servers refuse new calls and finish those in flight. For admins."""

    url: ServiceArgument

    def run(self) -> None:
        """Ask and show."""
        with _connected(self.url) as servers:
            for server in servers:
                server.answer(Call.DRAIN, pb.DrainRequest(), pb.DrainReply)
                console_on(sys.stdout).print_line(f"{server.name}: draining")


def _asked(server: "Server") -> tuple[pb.HelloReply, float]:
    """Return what a server says of itself and of what it holds for the caller, and the seconds of the answer."""
    started_s = time.perf_counter()
    hello = server.answer(Call.HELLO, pb.HelloRequest(), pb.HelloReply)
    return hello, time.perf_counter() - started_s


def _connected(url: str) -> "AbstractContextManager[list[Server]]":
    """Open connections; what they need is imported here."""
    module = import_with_extra("unified_cache.storage_backends.remote.server", "remote", "a service")
    connected: AbstractContextManager[list[Server]] = module.connected(url)
    return connected


for _name, _command in (("ping", PingCommand), ("drain", DrainCommand)):
    remote_app.command(_name, epilog=example(f"unified-cache {_name} grpc://127.0.0.1:50051"))(_command)
