"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "TOKENS_HELP",
    "BigramsOption",
    "CacheSaltOption",
    "ExtraKeyOption",
    "IdentityOption",
    "JsonFileOption",
    "JsonOption",
    "LoraIdOption",
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
BigramsOption = Annotated[bool, typer.Option("--bigrams", help="Namespace of the prompts: pages of bigrams (EAGLE).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json-file", metavar="FILE", help="Write the JSON to a file, beside what is printed.")
]
