"""Arguments and options that several commands share: one by one, and as bases of the commands that have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.json_output import shown_as_json
from unified_cache.page import Namespace

__all__ = [
    "TOKENS_HELP",
    "BigramsOption",
    "CacheSaltOption",
    "ExtraKeyOption",
    "IdentityOption",
    "JsonFileOption",
    "JsonOption",
    "JsonOptions",
    "LoraIdOption",
    "NamespaceOptions",
    "StoreArgument",
    "TokensFileOption",
]

StoreArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Store: file:DIR, packed:DIR or package.module:factory.")
]
IdentityOption = Annotated[
    str | None, typer.Option(metavar="DIGEST", help="One identity alone, by the first digits of its digest.")
]
TOKENS_HELP = "Token ids: JSON lists, one or one a line, or ids with spaces between."
TokensFileOption = Annotated[Path, typer.Option(metavar="FILE", help=TOKENS_HELP)]
ExtraKeyOption = Annotated[str | None, typer.Option(help="Namespace of the prompts: extra key.")]
CacheSaltOption = Annotated[str | None, typer.Option(help="Namespace of the prompts: cache salt.")]
LoraIdOption = Annotated[str | None, typer.Option(help="Namespace of the prompts: adapter.")]
TenantOption = Annotated[str | None, typer.Option(help="Namespace of the prompts: tenant.")]
BigramsOption = Annotated[bool, typer.Option("--bigrams", help="Namespace of the prompts: pages of bigrams (EAGLE).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json-file", metavar="FILE", help="Write the JSON to a file, beside what is printed.")
]


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """Options of a command that shows figures: where to write them as JSON."""

    as_json: JsonOption = False
    json_file: JsonFileOption = None

    def shown_as_json(self, command: str, value: Mapping[str, object]) -> bool:
        """Write the figures as the options say; tell whether they were printed, so that nothing else is.

        Raises:
            OSError: the file cannot be written. It is as it was.
        """
        return shown_as_json(command, value, on_stdout=self.as_json, file=self.json_file)


@dataclass(frozen=True, kw_only=True)
class NamespaceOptions:
    """Options of a command about prompts in a store: the namespace that their pages are in."""

    extra_key: ExtraKeyOption = None
    cache_salt: CacheSaltOption = None
    lora_id: LoraIdOption = None
    tenant: TenantOption = None
    bigrams: BigramsOption = False

    @property
    def namespace(self) -> Namespace:
        """Return the namespace that the options name."""
        return Namespace(self.extra_key, self.cache_salt, self.lora_id, self.tenant, bigrams=self.bigrams)
