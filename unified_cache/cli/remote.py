"""``unified-cache ping``, ``stat``, ``lookup``, ``get``, ``put``, ``clear`` and ``drain``: a service asked by a person.

What a page is like, its pools and their sizes, the service says itself; of an identity that it does not know yet, a
store that has it (``--like``). The service's client is imported when it is needed: it brings gRPC, an extra.
"""

import stat
import sys
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unified_cache.byte_sizes import size_text
from unified_cache.cli.options import (
    BigramsOption,
    CacheSaltOption,
    ExtraKeyOption,
    IdentityOption,
    JsonOptions,
    LoraIdOption,
    TokensFileOption,
)
from unified_cache.cli.progress import watched
from unified_cache.cli.text import console_on, example
from unified_cache.errors import CacheError, ConfigError
from unified_cache.extras import import_with_extra
from unified_cache.files import write_whole
from unified_cache.offline.prompts import read_prompts
from unified_cache.offline.stores import (
    StoredIdentity,
    Undescribed,
    WantedIdentity,
    identities_of,
    open_to_read,
    open_to_write,
)
from unified_cache.page import Namespace, PageKey
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import HEADER_BYTES, Label, verify
from unified_cache.storage_backends.manifest import Description, manifest_of, model_without_tenant
from unified_cache.storage_backends.protocol import Level, PageIO, StorageBackend
from unified_cache.storage_backends.verified import VerifiedStorage

if TYPE_CHECKING:
    from unified_cache.storage_backends.remote.inquiry import Inquiry, PromptCoverage

__all__ = [
    "DrainCommand",
    "GetCommand",
    "LookupCommand",
    "PingCommand",
    "PutCommand",
    "RemoteClearCommand",
    "RemoteStatCommand",
    "remote_app",
]

remote_app = typer.Typer(rich_markup_mode="markdown")

DIGEST_BYTES = 32

ServiceArgument = Annotated[str, typer.Argument(metavar="URL", help="Service: grpc://HOST:PORT or grpcs://HOST:PORT.")]
LIKE_HELP = "A store that has the identity, as file:DIR, where the service does not know it yet."
LikeOption = Annotated[str | None, typer.Option(metavar="STORE", help=LIKE_HELP)]
ModelOption = Annotated[str | None, typer.Option(metavar="NAME", help="The model, where the service has several.")]
PageSizeOption = Annotated[int | None, typer.Option(metavar="N", help="Tokens of a page, where it has several sizes.")]
ObjectArgument = Annotated[str, typer.Argument(metavar="OBJECT", help="IDENTITY/KEY.POOL, as stores list it.")]


@dataclass(frozen=True, slots=True)
class PingCommand(JsonOptions):
    """Ask every server of a service whether it answers, whom it takes you for, and how long it takes."""

    url: ServiceArgument

    def run(self) -> None:
        """Ask and show.

        Raises:
            ConfigError: no URL of a service.
            StorageError: a server does not answer, or refuses.
        """
        with _opened(self.url) as inquiry:
            pongs = inquiry.ping()
        value = {"servers": [asdict(pong) for pong in pongs]}
        if self.shown_as_json("ping", value):
            return
        rows = (
            (pong.server, pong.tenant, pong.store, "yes" if pong.durable else "no", f"{pong.seconds * 1000:.1f}")
            for pong in pongs
        )
        console_on(sys.stdout).print_table(("server", "tenant", "store", "durable", "ms"), rows, left=4)


@dataclass(frozen=True, slots=True)
class RemoteStatCommand(JsonOptions):
    """Show what each server of a service holds for you."""

    url: ServiceArgument

    def run(self) -> None:
        """Ask and show.

        Raises:
            ConfigError: no URL of a service.
            StorageError: a server does not answer, or refuses.
        """
        with _opened(self.url) as inquiry:
            stats = inquiry.stats()
        servers = [
            {
                "server": server,
                "stored_bytes": each.stored_bytes,
                "identities": each.identities_count,
            }
            for server, each in stats.items()
        ]
        if self.shown_as_json("stat", {"servers": servers}):
            return
        rows = ((server, size_text(each.stored_bytes), f"{each.identities_count:,}") for server, each in stats.items())
        console_on(sys.stdout).print_table(("server", "stored", "identities"), rows)


@dataclass(frozen=True, slots=True)
class LookupCommand(JsonOptions):
    """Tell how much of each prompt in a file a service can restore, in tokens.

    Of the one model that it has pages of; where there are several, name one with --model, --page-size or --identity.
    """

    url: ServiceArgument
    tokens: TokensFileOption
    model: ModelOption = None
    page_size: PageSizeOption = None
    like: LikeOption = None
    identity: IdentityOption = None
    extra_key: ExtraKeyOption = None
    cache_salt: CacheSaltOption = None
    lora_id: LoraIdOption = None
    bigrams: BigramsOption = False

    def run(self) -> None:
        """Ask and show.

        Raises:
            InputError: no such service, identity or file of token ids.
            StorageError: the server does not answer, or refuses.
        """
        described = _described(self.like or self.url, WantedIdentity(self.identity, self.model, self.page_size))
        page_size = described.layout.page_size
        namespace = Namespace(self.extra_key, self.cache_salt, self.lora_id, bigrams=self.bigrams)
        prompts = read_prompts(self.tokens, page_size, namespace)
        found: list[PromptCoverage] = []
        with _opened(self.url) as inquiry, watched(sys.stderr, "lookup", len(prompts), "prompts") as tell:
            for covered in inquiry.lookup(_manifest(described), [prompt.keys for prompt in prompts]):
                found.append(covered)
                tell(len(found), "")
        value = {
            "model": described.identity.model,
            "page_size": page_size,
            "prompts": [{**asdict(each), "restorable_tokens": each.end * page_size} for each in found],
        }
        if self.shown_as_json("lookup", value):
            return
        rows = (
            (
                f"{number}",
                f"{each.pages_count:,}",
                f"{each.end:,}",
                f"{each.end * page_size:,}",
                each.bound_by or "nothing",
            )
            for number, each in enumerate(found, 1)
        )
        console_on(sys.stdout).print_table(("prompt", "pages", "restorable", "tokens", "bound by"), rows)


@dataclass(frozen=True, slots=True)
class GetCommand:
    """Get one object of a service, verified, into a file of its owner alone: header and payload as stores keep them."""

    url: ServiceArgument
    name: ObjectArgument
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")]
    like: LikeOption = None

    def run(self) -> None:
        """Get and write.

        Raises:
            InputError: no such service, identity or pool, no name of an object, or --output is no file.
            CacheError: the service does not have it, does not answer, or refuses.
        """
        label = _label_of(self.name)
        _check_output(self.output)
        described = _described(self.like or self.url, WantedIdentity(label.identity.hex()))
        label = label._replace(identity=_manifest(described).identity)
        sizes = {pool.name: pool.page_bytes for pool in described.layout.pools}
        if label.pool not in sizes:
            raise ConfigError(f"{self.name} must name a pool of {', '.join(sizes)}, found {label.pool!r}")
        page = bytearray(HEADER_BYTES + sizes[label.pool])
        with closing(_store_at(self.url, described)) as storage:
            (answer,) = storage.get([PageIO(label, None, (memoryview(page),))])
            if not answer:
                raise CacheError(f"{self.url} must have {self.name}, found a {answer.value}")
        write_whole(self.output, bytes(page), mode=0o600)


@dataclass(frozen=True, slots=True)
class PutCommand:
    """Put one object, in a file as get writes it, into a service under its name."""

    url: ServiceArgument
    name: ObjectArgument
    source: Annotated[Path, typer.Option("--input", metavar="FILE", help="The object: header and payload.")]
    like: LikeOption = None
    durable: Annotated[bool, typer.Option("--durable", help="Wait until it would survive a crash.")] = False

    def run(self) -> None:
        """Check and put.

        Raises:
            InputError: no such service or identity, no name of an object, or a file that holds another.
            CacheError: the service declined it, does not answer, or refuses.
        """
        label = _label_of(self.name)
        described = _described(self.like or self.url, WantedIdentity(label.identity.hex()))
        label = label._replace(identity=_manifest(described).identity)
        page = memoryview(self.source.read_bytes())
        flaw = verify(page, label)
        if flaw is not None:
            raise ConfigError(f"{self.source} must hold {self.name}: {flaw.value}")
        level = Level.DURABLE if self.durable else Level.CACHED
        with closing(_store_at(self.url, described)) as storage:
            (answer,) = storage.put([PageIO(label, None, (page,))], level)
            if not answer:
                raise CacheError(f"{self.url} must take {self.name}, found a {answer.value}")


@dataclass(frozen=True, slots=True)
class RemoteClearCommand(JsonOptions):
    """Remove every page of one identity of yours from a service, its memory included. Without --yes nothing is removed.

    Name it with --model, --page-size or --identity. With --all: every identity of yours that the servers know, which is
    an admin's to do.
    """

    url: ServiceArgument
    model: ModelOption = None
    page_size: PageSizeOption = None
    like: LikeOption = None
    identity: IdentityOption = None
    everything: Annotated[bool, typer.Option("--all", help="Every identity that the servers know of you.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False

    def run(self) -> None:
        """Ask and show.

        Raises:
            InputError: neither or both of a name and --all, no --yes, or no such service or identity.
            StorageError: a server does not answer, or refuses; those before it are cleared.
        """
        wanted = WantedIdentity(self.identity, self.model, self.page_size)
        if self.everything == (wanted != WantedIdentity() or self.like is not None):
            raise ConfigError("clear needs either --model NAME or --identity DIGEST, or --all")
        described = None if self.everything else _described(self.like or self.url, wanted)
        if not self.yes:
            going = "every identity of yours" if described is None else described.identity.model
            raise ConfigError(f"clear would remove all pages of {going} from {self.url}; say so with --yes")
        with _opened(self.url) as inquiry:
            removed_counts = inquiry.clear(None if described is None else _manifest(described))
        servers = [{"server": server, "removed_objects": count} for server, count in removed_counts.items()]
        if self.shown_as_json("clear", {"servers": servers}):
            return
        for server, count in removed_counts.items():
            console_on(sys.stdout).print_line(f"{server}: removed {count:,} objects")


@dataclass(frozen=True, slots=True)
class DrainCommand:
    """End a service as SIGTERM does: its servers refuse new calls and finish those in flight. For admins."""

    url: ServiceArgument

    def run(self) -> None:
        """Ask and show.

        Raises:
            ConfigError: no URL of a service.
            StorageError: a server does not answer, or refuses; those before it are ending.
        """
        with _opened(self.url) as inquiry:
            for server in inquiry.drain():
                console_on(sys.stdout).print_line(f"{server}: draining")


def _opened(url: str) -> "AbstractContextManager[Inquiry]":
    """Open connections; what they need is imported here.

    Raises:
        ConfigError: gRPC is not installed, or the URL names no service.
    """
    module = import_with_extra("unified_cache.storage_backends.remote.inquiry", "remote", "a service")
    opened: AbstractContextManager[Inquiry] = module.open_inquiry(url)
    return opened


def _check_output(path: Path) -> None:
    """Refuse a link, a directory or a device: the object would go elsewhere, or replace what is none of ours."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(f"--output must name a file, or nothing yet, found something else: {path}")


def _store_at(url: str, described: Description) -> StorageBackend:
    storage = open_to_write(url)
    try:
        storage.register(_manifest(described), {})
    except CacheError:
        storage.close()
        raise
    return VerifiedStorage(storage)


def _described(source: str, wanted: WantedIdentity) -> Description:
    """Return what the service's clients call an identity that a service or a store has: by its digest in either."""
    with closing(open_to_read(source)) as storage:
        found = identities_of(storage)
    if wanted.digest is not None and any(wanted.matches(kept) for kept in found):
        return _without_tenant(wanted.choose(found, source).described())
    plain = [_as_clients_call_it(kept) for kept in found]
    return wanted.choose(plain, source).described()


def _as_clients_call_it(kept: StoredIdentity) -> StoredIdentity:
    if isinstance(kept.description, Undescribed):
        return kept
    described = _without_tenant(kept.description)
    return StoredIdentity(_manifest(described).identity, described)


def _without_tenant(described: Description) -> Description:
    model = model_without_tenant(described.identity.model)
    return Description(replace(described.identity, model=model), described.layout)


def _manifest(described: Description) -> Manifest:
    return manifest_of(described.identity, described.layout)


def _label_of(name: str) -> Label:
    identity, _, rest = name.partition("/")
    key, _, pool = rest.partition(".")
    try:
        label = Label(bytes.fromhex(identity), PageKey(bytes.fromhex(key)), pool)
    except ValueError:
        label = Label(b"", PageKey(b""), "")
    if (len(label.identity), len(label.key)) != (DIGEST_BYTES, DIGEST_BYTES) or not pool:
        raise ConfigError(f"an object is named IDENTITY/KEY.POOL, two digests in hex and a pool, found {name[:200]!r}")
    return label


REMOTE_COMMANDS = {
    "ping": (PingCommand, ""),
    "stat": (RemoteStatCommand, " --json"),
    "lookup": (LookupCommand, " --tokens prompts.jsonl"),
    "get": (GetCommand, " IDENTITY/KEY.POOL --output page"),
    "put": (PutCommand, " IDENTITY/KEY.POOL --input page"),
    "clear": (RemoteClearCommand, " --model NAME --yes"),
    "drain": (DrainCommand, ""),
}
"""Commands by name, each with the arguments of an example after the URL."""


for _name, (_command, _arguments) in REMOTE_COMMANDS.items():
    _line = f"unified-cache {_name} grpc://127.0.0.1:50051{_arguments}"
    remote_app.command(_name, epilog=example(_line))(_command)
