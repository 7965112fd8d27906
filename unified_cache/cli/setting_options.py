"""Options that are settings: named, described and read as in the file of settings and in the environment."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from typer.models import OptionInfo

from unified_cache.core.settings.describe import setting_named
from unified_cache.core.settings.loading import FILE_NAME, merged, table_of
from unified_cache.core.settings.names import flag_name
from unified_cache.core.settings.section import Settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["ConfigOption", "SetOption", "SettingOption", "given_flags"]

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"Settings in TOML. [default: {FILE_NAME}, where there is one]"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; unified-cache config init prints all."),
]


class SettingOption(OptionInfo):
    """Option of a setting, with its meaning as help."""

    def __init__(self, model: type[Settings], name: str, metavar: str | None = None) -> None:
        setting = setting_named(model, name)
        flag = flag_name(setting.path)
        if setting.kind == "true or false":
            flag += f"/--no-{flag.removeprefix('--')}"
        default = "" if setting.default in (None, ()) else f" [default: {setting.default_text}]"
        super().__init__(
            default=...,
            param_decls=(flag,),
            metavar=metavar or {"bytes": "BYTES", "seconds": "SECONDS"}.get(setting.kind),
            help=setting.meaning.replace("``", "") + default,
            case_sensitive=False,
        )
        self.name = name


def given_flags(command: "DataclassInstance", also: Mapping[str, object] = MappingProxyType({})) -> dict[str, object]:
    """Return the options of settings that a command was given, as tables in tables.

    ``also`` has settings that another option gives, by name; the option of a setting itself wins.
    """
    given, values = dict(also), asdict(command)
    for field in fields(command):
        for option in get_args(field.type):
            if isinstance(option, SettingOption) and values[field.name] not in (None, []):
                given[option.name] = values[field.name]
    return merged(*(table_of(name, value) for name, value in given.items() if value is not None))
