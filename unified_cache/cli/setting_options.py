"""Options that are settings: named, described and read as in the file of settings and in the environment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast

import typer
from typer.models import OptionInfo

from unified_cache.errors import ConfigError
from unified_cache.settings.describe import setting_named
from unified_cache.settings.loading import FILE_NAME
from unified_cache.settings.names import flag_name
from unified_cache.settings.section import Settings

__all__ = ["ConfigOption", "SetOption", "given_flags", "setting_option"]

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"Settings in TOML. [default: {FILE_NAME}, where there is one]"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; unified-cache config init prints all."),
]


def setting_option(model: type[Settings], name: str, metavar: str | None = None) -> OptionInfo:
    """Return the option of a setting, with its meaning as help."""
    setting = setting_named(model, name)
    flag = flag_name(setting.path)
    if setting.kind == "true or false":
        flag += f"/--no-{flag.removeprefix('--')}"
    default = "" if setting.default in (None, ()) else f" [default: {setting.default_text}]"
    made = typer.Option(
        flag,
        metavar=metavar or {"bytes": "BYTES", "seconds": "SECONDS"}.get(setting.kind),
        help=setting.meaning.replace("``", "") + default,
        case_sensitive=False,
    )
    return cast(OptionInfo, made)


def given_flags(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that were given, by the names of their settings, as tables in tables.

    Raises:
        ConfigError: two options name one setting, with its table and by itself.
    """
    flags: dict[str, object] = {}
    for name, value in options.items():
        if value is None:
            continue
        *tables, last = name.split(".")
        table = flags
        for each in tables:
            inner = table.setdefault(each, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{flag_name((each,))} must not stand beside {flag_name(tuple(name.split('.')))}")
            table = inner
        table[last] = value
    return flags
