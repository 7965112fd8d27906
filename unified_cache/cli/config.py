"""``unified-cache config``: a file of settings explained, and one written to begin with."""

import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.text import console_on, example
from unified_cache.core.byte_sizes import bytes_literal
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.advice import warnings_about
from unified_cache.core.settings.describe import ANY_NAME, Setting, settings_of
from unified_cache.core.settings.loading import FILE_NAME, LoadedSettings, SettingSource, read_settings
from unified_cache.core.settings.names import SECTIONS
from unified_cache.core.settings.section import Settings
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.core.settings.toml import SettingPath, toml_literal

__all__ = ["ConfigCheckCommand", "ConfigInitCommand", "SectionName", "config_app", "file_to_begin_with"]

CONFIG_EPILOG = """**Examples**

    unified-cache config init > unified-cache.toml

    unified-cache config check

    unified-cache config check service.toml --for serve --all
"""

config_app = typer.Typer(
    name="config",
    epilog=CONFIG_EPILOG,
    help="Explain a file of settings, or write one to begin with.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

EXAMPLES: Mapping[str, object] = {"bytes": "1GiB", "pages": 1000, "count": 1, "number": 1.0, "seconds": 60.0}
"""Values that a setting of a kind could have."""

_Loaded = Mapping[str, LoadedSettings[Settings]]


class SectionName(Enum):
    """Sections of the file, as options name them."""

    CACHE = "cache"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class ExplainedSetting:
    """One value, for all sections that have it from one place."""

    setting: Setting
    name: str
    value: object
    source: SettingSource
    place: str
    sections: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return it as values that JSON has."""
        return {
            "name": self.name,
            "sections": list(self.sections),
            "value": self.value,
            "source": self.source.value,
            "place": self.place,
            "kind": self.setting.kind,
            "default": self.setting.default,
            "meaning": self.setting.meaning,
        }


@dataclass(frozen=True, slots=True)
class ConfigCheckCommand(JsonOptions):
    """Explain a file of settings: every value, where it came from, what it means, and what follows from it.

    The environment counts as it would for the commands themselves. An unknown name or a value that makes no sense is an
    error with its line; settings that contradict each other are warnings.
    """

    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help=f"File to explain. [default: {FILE_NAME}, if there is one]")
    ] = None
    only: Annotated[
        SectionName | None, typer.Option("--for", help="For one command alone, or for a cache that an engine embeds.")
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="Show settings at their defaults too.")] = False

    def run(self) -> None:
        """Read and explain."""
        names = list(SECTIONS) if self.only is None else [self.only.value]
        loaded = _all_read(names, self.file)
        explained = _explained(loaded)
        derived = dict(_derived(loaded))
        warnings = {
            text: tuple(name for name, each in loaded.items() if text in warnings_about(each))
            for one in loaded.values()
            for text in warnings_about(one)
        }
        path = next(iter(loaded.values())).file
        value = {
            "file": None if path is None else str(path),
            "settings": [each.as_json() for each in explained],
            "derived": derived,
            "warnings": [{"sections": list(sections), "text": text} for text, sections in warnings.items()],
        }
        if self.shown_as_json("config check", value):
            return
        console = console_on(sys.stdout)
        console.print_line(f"settings of {', '.join(names)}: {path or 'no file, the environment alone'}", style="bold")
        shown = [each for each in explained if self.everything or each.source is not SettingSource.DEFAULT]
        if shown:
            console.print_table(("setting", "value", "from", "for", "meaning"), map(_row, shown), left=5)
        if len(explained) > len(shown):
            console.print_line(f"{len(explained) - len(shown)} settings are at their defaults; --all shows them")
        for name, text in derived.items():
            console.print_line(f"{name}: {text}")
        for text, sections in warnings.items():
            console.print_line(f"warning ({', '.join(sections)}): {text}")


@dataclass(frozen=True, slots=True)
class ConfigInitCommand:
    """Print a file of settings to begin with: all there are, with their defaults, as comments."""

    only: Annotated[
        SectionName | None, typer.Option("--for", help="For one command alone, or for a cache that an engine embeds.")
    ] = None

    def run(self) -> None:
        """Print."""
        sys.stdout.write(file_to_begin_with(list(SECTIONS) if self.only is None else [self.only.value]))


def file_to_begin_with(sections: list[str]) -> str:
    """Return a file in which every setting of the sections is a comment, with its default and its meaning."""
    lines = [
        f"# {FILE_NAME}: settings of {', '.join(sections)}. Take away the # before what you set.",
        "# A setting before the first section is for every command that has it; in a section, for that one alone.",
    ]
    for section in sections:
        settings = settings_of(SECTIONS[section])
        tables = dict.fromkeys((section, *setting.path[:-1]) for setting in settings)
        for path in sorted(tables, key=len):  # values of a table go before the tables in it
            lines += ["", f"[{section}]" if path == (section,) else f"# [{'.'.join(path)}]"]
            for setting in settings:
                if (section, *setting.path[:-1]) == path:
                    lines += [f"# {line}" for line in _wrapped(setting)]
                    lines.append(f"# {setting.path[-1]} = {_default_literal(setting)}")
    return "\n".join(lines) + "\n"


def _default_literal(setting: Setting) -> str:
    """Return the default of a setting as a file has it; of one without, a value that it could have."""
    if setting.default is None:
        return f"{toml_literal(EXAMPLES.get(setting.kind, setting.name))}  # unset"
    return toml_literal(setting.default_text if setting.kind == "bytes" and setting.default else setting.default)


def _wrapped(setting: Setting) -> list[str]:
    """Return the meaning of a setting, and the values that there are, in lines of a file."""
    words = setting.meaning.replace("``", "") + (f" One of {', '.join(setting.values)}." if setting.values else "")
    return textwrap.wrap(words, 111, break_long_words=False, break_on_hyphens=False)


def _all_read(names: list[str], file: Path | None) -> _Loaded:
    """Read the settings of all sections."""
    loaded: dict[str, LoadedSettings[Settings]] = {}
    flaws: dict[str, None] = {}
    for name in names:
        try:
            loaded[name] = read_settings(SECTIONS[name], file)
        except ConfigError as error:
            flaws.update(dict.fromkeys(str(error).split("; ")))
    if flaws:
        raise ConfigError("; ".join(flaws))
    return loaded


def _explained(loaded: _Loaded) -> list[ExplainedSetting]:
    """Return every value, once where several sections have it from one place, or leave it at one default."""
    found: dict[tuple[str, str, str], ExplainedSetting] = {}
    for section, each in loaded.items():
        values = each.settings.model_dump(mode="json")
        for setting in settings_of(type(each.settings)):
            for path, value in _values(values, setting.path):
                origin = each.origin(path)
                name = ".".join(path)
                key = (name, repr(value), origin.place)
                before = found.get(key, ExplainedSetting(setting, name, value, origin.source, origin.place, ()))
                found[key] = replace(before, sections=(*before.sections, section))
    return list(found.values())


def _values(values: object, path: SettingPath) -> Iterator[tuple[SettingPath, object]]:
    """Yield the value at a path, None in a table that is unset; under a name that users choose, one for each name."""
    if not path:
        yield (), values
        return
    table = values if isinstance(values, Mapping) else {}
    for name in sorted(table) if path[0] == ANY_NAME else path[:1]:
        yield from (((name, *inner), value) for inner, value in _values(table.get(name), path[1:]))


def _row(explained: ExplainedSetting) -> tuple[str, ...]:
    sections = explained.sections[0] if len(explained.sections) == 1 else "all that have it"
    meaning = explained.setting.meaning.replace("``", "")
    return (explained.name, _text(explained), explained.place, sections, meaning)


def _text(explained: ExplainedSetting) -> str:
    if explained.value is None:
        return "unset"
    if explained.setting.kind == "bytes" and isinstance(explained.value, int):
        return bytes_literal(explained.value)
    return explained.value if isinstance(explained.value, str) else toml_literal(explained.value)


def _derived(loaded: _Loaded) -> Iterator[tuple[str, str]]:
    """Yield what follows from the settings: a name, and a sentence."""
    for each in loaded.values():
        settings = each.settings
        if isinstance(settings, ServiceSettings):
            yield "serve is reached", "by this machine alone" if settings.address.is_local else "by other machines"
            yield "serve is called by", _callers(settings)


def _callers(settings: ServiceSettings) -> str:
    ways = []
    if settings.tls is not None and settings.tls.client_ca is not None:
        ways.append("client certificates")
    if settings.access.tokens is not None:
        ways.append("tokens")
    alone = f"anyone who reaches it, as tenant {settings.access.local_tenant}, {settings.access.local_role.value}"
    return f"anyone who shows {' or '.join(ways)}" if ways else alone


for _name, _command, _options in (
    ("check", ConfigCheckCommand, " unified-cache.toml"),
    ("init", ConfigInitCommand, ""),
):
    config_app.command(_name, epilog=example(f"unified-cache config {_name}{_options}"))(_command)
