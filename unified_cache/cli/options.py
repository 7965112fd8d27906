"""Arguments and options that several commands share: one by one, and as bases of the commands that have them."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.core.errors import InputError
from unified_cache.core.page import Namespace

StoreArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Store: file:DIR, packed:DIR or package.module:factory.")
]
IdentityOption = Annotated[
    str | None, typer.Option(metavar="DIGEST", help="One identity alone, by the first digits of its digest.")
]
TOKENS_HELP = "Token ids: JSON lists, one or one a line, or ids with spaces between."
TokensFileOption = Annotated[Path, typer.Option(metavar="FILE", help=TOKENS_HELP)]
ModelOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="A preset, a config.json or a directory with one.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="What the model's K and V are kept in. [default: the model's own dtype]")
]
KeepTailOption = Annotated[
    int,
    typer.Option(metavar="TOKENS", help="Keep windows and states at every page boundary of so many last tokens, too."),
]
EnginesOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Engines that take the requests in turn, each with device and host memory of its own, over one store.",
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="The trace's first N requests only.")]
ReportOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write a page with pictures into this directory.")
]
JSON_FORMAT = 1
"""Raised when a field that was there means something else, or is there no more; new fields do not raise it."""


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """Option of a command that shows figures: as JSON in place of its tables.

    Every value is an object that begins with ``command`` and ``format``; docs/json.md says what follows, by command.
    """

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False

    def shown_as_json(self, command: str, value: Mapping[str, object]) -> bool:
        """Print the figures if asked to; return whether they were printed, so that nothing else is."""
        if self.as_json:
            sys.stdout.write(_json_of(command, value))
        return self.as_json


def _json_of(command: str, value: Mapping[str, object]) -> str:
    """Return figures as JSON; one that is no finite number is null, since JSON has none."""
    figures = json.dumps({"command": command, "format": JSON_FORMAT, **value})
    return json.dumps(json.loads(figures, parse_constant=lambda _: None), indent=2) + "\n"


@dataclass(frozen=True, kw_only=True)
class NamespaceOptions:
    """Option of a command about prompts in a store: the namespace that their pages are in."""

    namespaced: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="NAME=VALUE",
            help="Namespace of the prompts, name by name: extra_key, cache_salt, lora_id, tenant; bigrams=yes (EAGLE).",
        ),
    ] = None

    @property
    def namespace(self) -> Namespace:
        """Return the namespace that the options name.

        Raises:
            InputError: a namespace has no such name, or no such value.
        """
        named = {name: value for name, _, value in (each.partition("=") for each in self.namespaced or ())}
        known = {each.name for each in fields(Namespace)}
        unknown = [name for name, value in named.items() if name not in known or not value]
        if unknown or named.get("bigrams", "yes") != "yes":
            raise InputError(
                f"--namespace must be NAME=VALUE with one of {', '.join(sorted(known))}, and bigrams=yes alone, "
                f"found {', '.join(self.namespaced or ())}"
            )
        texts = (named.get(name) for name in ("extra_key", "cache_salt", "lora_id", "tenant"))
        return Namespace(*texts, bigrams="bigrams" in named)
