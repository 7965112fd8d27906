"""``unified-cache router``: what engines hold, learnt from their KV events, for whoever chooses an engine for a prompt.

What follows engines is imported when it begins: it needs the extra ``router``, which the other commands do not.
"""

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from unified_cache.cli.json_output import shown_as_json
from unified_cache.cli.options import (
    BigramsOption,
    CacheSaltOption,
    ExtraKeyOption,
    JsonFileOption,
    JsonOption,
    LoraIdOption,
    TokensFileOption,
)
from unified_cache.cli.text import console_on, example, printable, table
from unified_cache.drain import Drain, signals_drain
from unified_cache.errors import ConfigError
from unified_cache.extras import import_with_extra
from unified_cache.offline.prompts import read_prompts
from unified_cache.page import DEFAULT_NAMESPACE, Namespace

if TYPE_CHECKING:
    from unified_cache.events.index import EngineScore, EngineTraits
    from unified_cache.events.router_client import EngineReport
    from unified_cache.events.subscriber import EventSource

__all__ = ["RouterEnginesCommand", "RouterScoreCommand", "RouterServeCommand", "router_app"]

ROUTER_EPILOG = """**Examples**

Follow two engines, and answer on this machine:

    unified-cache router serve --engine a=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558 --engine b=tcp://10.0.0.2:5557

    unified-cache router score 127.0.0.1:50061 --tokens prompt.json --json
"""

SERVE_LINE = "unified-cache router serve --engine a=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558"

router_app = typer.Typer(
    name="router",
    epilog=ROUTER_EPILOG,
    help="Follow the KV events of engines, and tell how much of a prompt each of them could resume.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

AddressArgument = Annotated[str, typer.Argument(metavar="ADDR", help="HOST:PORT or unix:PATH of a router's server.")]


@dataclass(frozen=True, slots=True)
class RouterServeCommand:
    """Follow engines and answer over gRPC until SIGTERM or Ctrl-C.

    Each engine is NAME=ENDPOINT, then what else is known of it: replay=ENDPOINT, its socket for replays; topic=TEXT;
    hashes=page_keys for an engine with this cache that sends vLLM's form; storage=NAME, alike for engines that share
    their storage.
    """

    engine: Annotated[
        list[str], typer.Option(metavar="NAME=ENDPOINT[,...]", help="An engine to follow; once for each of them.")
    ]
    listen: Annotated[str, typer.Option(metavar="ADDR", help="HOST:PORT or unix:PATH.")] = "127.0.0.1:50061"
    pages_max: Annotated[int, typer.Option(min=1, help="Pages kept for each engine, by tier and component.")] = 1 << 20
    insecure: Annotated[bool, typer.Option("--insecure", help="Answer other machines, which show no credentials.")] = (
        False
    )

    def run(self) -> None:
        """Serve until a signal.

        Raises:
            ConfigError: an engine or an address that cannot be.
        """
        servers, indexes = _router_module("router_server"), _router_module("index")
        subscribers = _router_module("subscriber")
        settings = servers.RouterSettings(self.listen, self.insecure)
        followed = [parse_engine(text) for text in self.engine]
        names = [name for name, _, _ in followed]
        if len(set(names)) != len(names):
            raise ConfigError(f"--engine must name each engine once, found {', '.join(names)}")
        drain = Drain()
        with ExitStack() as opened:
            subscriber = opened.enter_context(subscribers.EventSubscriber.start(indexes.PrefixIndex(self.pages_max)))
            for name, source, traits in followed:
                subscriber.follow(name, source, traits)
            server = servers.RouterServer.open(subscriber, settings)
            opened.callback(server.close)
            opened.enter_context(signals_drain(drain))
            sys.stdout.write(f"answering at {self.listen}, port {server.port}, for {', '.join(names)}\n")
            sys.stdout.flush()
            drain.wait()


@dataclass(frozen=True, slots=True)
class RouterScoreCommand:
    """Ask how many tokens of each prompt in a file each engine could resume, and from which tier."""

    address: AddressArgument
    tokens: TokensFileOption
    extra_key: ExtraKeyOption = None
    cache_salt: CacheSaltOption = None
    lora_id: LoraIdOption = None
    bigrams: BigramsOption = False
    as_json: JsonOption = False
    json_file: JsonFileOption = None

    def run(self) -> None:
        """Ask and show.

        Raises:
            InputError: no file of token ids, or the server refuses them.
            StateError: the server does not answer.
        """
        namespace = Namespace(self.extra_key, self.cache_salt, self.lora_id, bigrams=self.bigrams)
        prompts = [
            np.frombuffer(each.tokens, "<i4").tolist() for each in read_prompts(self.tokens, 1, DEFAULT_NAMESPACE)
        ]
        client = _router_module("router_client").RouterClient(self.address)
        try:
            found: list[list[EngineScore]] = [client.score(prompt, namespace) for prompt in prompts]
        finally:
            client.close()
        scored = [[{**asdict(score), "knowledge": score.knowledge.value} for score in scores] for scores in found]
        value = {"prompts": [{"engines": scores} for scores in scored]}
        if shown_as_json("router score", value, on_stdout=self.as_json, file=self.json_file):
            return
        shown = table("prompt", "engine", "known", "tokens", "device", "with host", "with storage", left=3)
        for number, (prompt, scores) in enumerate(zip(prompts, found, strict=True), 1):
            for score in scores:
                pages = (score.device_pages, score.host_pages, score.storage_pages)
                ends = [f"{count * score.page_size:,}" for count in pages]
                name = printable(score.engine)
                shown.add_row(str(number), name, score.knowledge.value, f"{len(prompt):,}", *ends)
        console_on(sys.stdout).print(shown)


@dataclass(frozen=True, slots=True)
class RouterEnginesCommand:
    """List the engines that a server follows, and how much it knows of each."""

    address: AddressArgument
    as_json: JsonOption = False
    json_file: JsonFileOption = None

    def run(self) -> None:
        """Ask and show.

        Raises:
            StateError: the server does not answer.
        """
        client = _router_module("router_client").RouterClient(self.address)
        try:
            reports: list[EngineReport] = client.engines()
        finally:
            client.close()
        value = {"engines": [{**asdict(report), "knowledge": report.knowledge.value} for report in reports]}
        if shown_as_json("router engines", value, on_stdout=self.as_json, file=self.json_file):
            return
        shown = table("engine", "known", "pages", "batches", "gaps", "losses", "restarts", left=2)
        for report in reports:
            counts = (report.pages, report.batches, report.gaps, report.losses, report.restarts)
            shown.add_row(printable(report.engine), report.knowledge.value, *map("{:,}".format, counts))
        console_on(sys.stdout).print(shown)


def parse_engine(text: str) -> "tuple[str, EventSource, EngineTraits]":
    """Read an engine to follow: NAME=ENDPOINT, then properties with commas between.

    Raises:
        ConfigError: it is none.
    """
    indexes, subscribers = _router_module("index"), _router_module("subscriber")
    first, *rest = text.split(",")
    name, _, endpoint = first.partition("=")
    properties = {key: value for key, _, value in (each.partition("=") for each in rest)}
    unknown = sorted(properties.keys() - {"replay", "topic", "hashes", "storage"})
    if not name or not endpoint or unknown or not all(properties.values()):
        raise ConfigError(
            "--engine expects NAME=ENDPOINT, then replay=, topic=, hashes= or storage= with commas between, "
            f"found {text!r}"
        )
    kinds = {kind.value: kind for kind in indexes.HashKind}
    hashes = properties.get("hashes", indexes.HashKind.OWN.value)
    if hashes not in kinds:
        raise ConfigError(f"hashes= must be one of {', '.join(kinds)}, found {hashes!r}")
    source = subscribers.EventSource(endpoint, properties.get("replay"), properties.get("topic", ""))
    return name, source, indexes.EngineTraits(kinds[hashes], properties.get("storage"))


def _router_module(name: str) -> ModuleType:
    """Import a part of what follows engines.

    Raises:
        ConfigError: what it needs is not installed.
    """
    return import_with_extra(f"unified_cache.events.{name}", "router", "a router")


for _name, _command, _line in (
    ("serve", RouterServeCommand, SERVE_LINE),
    ("score", RouterScoreCommand, "unified-cache router score 127.0.0.1:50061 --tokens prompt.json --json"),
    ("engines", RouterEnginesCommand, "unified-cache router engines 127.0.0.1:50061"),
):
    router_app.command(_name, epilog=example(_line))(_command)
