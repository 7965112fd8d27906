"""``unified-cache config check``: a file of settings explained."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from unified_cache import storage_backends
from unified_cache.cli.options import JsonOptions
from unified_cache.cli.text import console_on
from unified_cache.core.errors import ConfigError, without_secrets
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.describe import ANY_NAME, settings_of, value_text
from unified_cache.core.settings.loading import FILE_NAME, SECTIONS, LoadedSettings, read_settings
from unified_cache.core.settings.section import Settings
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.storage_backends.directory.front import parse_address
from unified_cache.storage_backends.directory.root import check_path
from unified_cache.storage_backends.offline.stores import has_cap_of_its_own
from unified_cache.storage_backends.url import check_storage_url, open_storage, split_choice
from unified_cache.storage_backends.wrappers.page_coding import PageCoder

CONFIG_EPILOG = """**Examples**

    unified-cache config check

    unified-cache config check --config service.toml --for serve --all
"""

config_app = typer.Typer(
    name="config", help="Explain a file of settings.", no_args_is_help=True, rich_markup_mode="markdown"
)


@dataclass(frozen=True, slots=True)
class ConfigCheckCommand(JsonOptions):
    """Explain a file of settings: every value, where it came from, what it means, and what contradicts what.

    The environment counts as it would for the commands themselves. An unknown name or a value that makes no sense is an
    error; settings that contradict each other are warnings.
    """

    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"File to explain. [default: {FILE_NAME}, if there is one]")
    ] = None
    only: Annotated[
        Literal["cache", "serve"] | None,
        typer.Option("--for", help="For one command alone, or for a cache that an engine embeds."),
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="Show settings at their defaults too.")] = False

    def run(self) -> None:
        """Read and explain."""
        loaded = _all_read(list(SECTIONS) if self.only is None else [self.only], self.config)
        explained = [each for section, found in loaded.items() for each in _explained(section, found)]
        warnings = [(name, text) for name, found in loaded.items() for text in _warnings(found.settings)]
        path = next(iter(loaded.values())).file
        value = {
            "file": None if path is None else str(path),
            "settings": explained,
            "warnings": [{"section": name, "text": text} for name, text in warnings],
        }
        if self.shown_as_json("config check", value):
            return
        console = console_on(sys.stdout)
        console.print_line(f"settings of {', '.join(loaded)}: {path or 'no file, the environment alone'}", style="bold")
        shown = [each for each in explained if self.everything or each["place"] != "default"]
        if shown:
            columns = ("setting", "value", "from", "for", "meaning")
            console.print_table(columns, [_row(each) for each in shown], left=5)
        if len(explained) > len(shown):
            console.print_line(f"{len(explained) - len(shown)} settings are at their defaults; --all shows them")
        for name, text in warnings:
            console.print_line(f"warning ({name}): {text}")


def _all_read(names: list[str], file: Path | None) -> Mapping[str, LoadedSettings[Settings]]:
    """Read the settings of all sections; what is wrong in several is said once."""
    loaded: dict[str, LoadedSettings[Settings]] = {}
    flaws: dict[str, None] = {}
    for name in names:
        try:
            loaded[name] = read_settings(SECTIONS[name], file)
            _check_store(loaded[name])
        except ConfigError as error:
            flaws.update(dict.fromkeys(str(error).split("; ")))
    if flaws:
        raise ConfigError("; ".join(flaws))
    return loaded


def _check_store(loaded: LoadedSettings[Settings]) -> None:
    """Refuse a URL that names no store, before a service or an engine does."""
    match loaded.settings:
        case EmbeddedSettings(store=str(url), storage_bytes=cap) | ServiceSettings(storage=str(url), storage_bytes=cap):
            try:
                _check_address(url)
            except ConfigError as error:
                raise ConfigError(f"{loaded.place(['storage'])}: storage: {error}") from error
            if cap is not None and has_cap_of_its_own(url):
                raise ConfigError(
                    f"{loaded.place(['storage_bytes'])}: storage_bytes must be unset for {without_secrets(url)}, "
                    f"which has a cap of its own, found {cap}"
                )


def _check_address(url: str) -> None:
    """Refuse what a store cannot be opened by: its scheme, its address, its keys. Nothing is opened or asked."""
    check_storage_url(url)
    bare, choice = split_choice(url)
    if choice is not None:
        PageCoder(choice)
    scheme, _, rest = bare.partition(":")
    package = storage_backends.__name__
    match scheme:  # the package of each is installed, and imported when it is needed
        case "file" | "packed":
            check_path(parse_address(rest, scheme).path)
        case "memory" | "keys_only":
            open_storage(bare).close()
        case "grpc" | "grpcs":
            import_module(f"{package}.remote.url").parse_rest(rest, secure=scheme == "grpcs")
        case "mooncake":
            import_module(f"{package}.mooncake.address").address_of_url(rest)
        case "az" | "gs" | "s3":
            import_module(f"{package}.object.address").address_of_url(scheme, rest)


def _warnings(settings: Settings) -> list[str]:
    match settings:
        case EmbeddedSettings() | ServiceSettings():
            return settings.warnings()
    return []


def _explained(section: str, loaded: LoadedSettings[Settings]) -> Iterator[dict[str, object]]:
    """Yield every value of a section with its place, as values that JSON has."""
    values = loaded.settings.model_dump(mode="json")
    for setting in settings_of(type(loaded.settings)):
        for path, value in _values(values, tuple(setting.name.split("."))):
            yield {
                "name": ".".join(path),
                "section": section,
                "value": value,
                "place": loaded.place(path),
                "default": None if setting.default is None else setting.default_text,
                "meaning": setting.meaning,
            }


def _values(values: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the value at a path, None in a table that is unset; under a name that users choose, one for each name."""
    if not path:
        yield (), values
        return
    table = values if isinstance(values, Mapping) else {}
    for name in sorted(table) if path[0] == ANY_NAME else path[:1]:
        yield from (((name, *inner), value) for inner, value in _values(table.get(name), path[1:]))


def _row(explained: Mapping[str, object]) -> tuple[str, ...]:
    name, meaning = str(explained["name"]), str(explained["meaning"]).replace("``", "")
    return name, value_text(name, explained["value"]), str(explained["place"]), str(explained["section"]), meaning


config_app.command("check", epilog=CONFIG_EPILOG)(ConfigCheckCommand)
