"""Settings from where they are given: flags win over the environment, that over the file, and that over the defaults.

A setting at the top of the file is that of every command that has it; in the table of a command, such as ``[replay]``,
it is that of this command alone, and wins. Variables are named alike: ``UNIFIED_CACHE_HOST_BYTES`` is ``host_bytes``,
``UNIFIED_CACHE_REPLAY_HOST_BYTES`` the same of a replay alone, ``UNIFIED_CACHE_GUARD__DEADLINE_S`` is ``deadline_s`` of
``[guard]``.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from unified_cache.errors import ConfigError
from unified_cache.gone import value_instead
from unified_cache.nesting import parse_json
from unified_cache.settings.cache import EmbeddedSettings
from unified_cache.settings.describe import is_known
from unified_cache.settings.names import (
    FILE_VARIABLE,
    SECTIONS,
    flag_name,
    is_setting_variable,
    named_by_variable,
    nearest_names,
    nearest_variables,
    section_of,
)
from unified_cache.settings.origins import GivenValues, Origin, SettingSource
from unified_cache.settings.section import Section
from unified_cache.settings.service import ServiceSettings
from unified_cache.settings.toml import SettingPath, TomlFile, flattened, read_toml

__all__ = ["FILE_NAME", "LoadedSettings", "cache_settings", "find_file", "read_settings", "service_settings"]

FILE_NAME = "unified-cache.toml"
"""Read from the working directory, where no other file is named."""

SHOWN_MAX = 80
"""Characters of a value that a message shows."""

NOTHING: Mapping[str, object] = MappingProxyType({})

_WORDS = {
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "dataclass_type": "must be a table",
    "tuple_type": "must be a list",
    "missing": "must be set",
}
"""Flaws in the words of a file, by pydantic's names of them."""

_OF_SEVERAL = ("value_error", "library")
"""Flaws of settings that contradict each other: the sentence begins with the name of one of them."""

_DEFAULT = Origin(SettingSource.DEFAULT, SettingSource.DEFAULT.value)

_S = TypeVar("_S", bound=Section)


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[_S]):
    """Settings of one section, and where each came from."""

    settings: _S
    file: Path | None
    origins: Mapping[SettingPath, Origin]
    """Sources of what is not left at its default."""

    def origin(self, path: SettingPath) -> Origin:
        """Return the source of one setting."""
        return next(
            (self.origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.origins), _DEFAULT
        )


def find_file(named: Path | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of settings: the one named, else that of ``UNIFIED_CACHE_CONFIG``, else that of the directory."""
    if named is not None:
        return named
    if environment.get(FILE_VARIABLE):
        return Path(environment[FILE_VARIABLE])
    return Path(FILE_NAME) if Path(FILE_NAME).exists() else None


def read_settings(
    model: type[_S],
    file: Path | None = None,
    flags: Mapping[str, object] = NOTHING,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> LoadedSettings[_S]:
    """Read the settings of one section from all sources.

    ``flags`` has values by name, tables as mappings; ``assignments`` are ``NAME=VALUE``, which a flag wins over.

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a value makes no sense; one line says where, what
            was expected and what was found.
    """
    path = find_file(file, environment)
    section = section_of(model)
    given = GivenValues()
    flaws: list[str] = []
    if path is not None:
        found = read_toml(path)
        flaws += _unknown_in(found)
        _lay_file(given, found, section)
    flaws += _lay_environment(given, environment, section)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        each = tuple(name.strip().split("."))
        if not equals or not is_known(model, each):
            expected = (
                f"there is no setting {name}{nearest_names((section, *each))}" if equals else "must be NAME=VALUE"
            )
            flaws.append(f"--set {assignment}: {expected}")
        given.lay(each, _read_text(text), Origin(SettingSource.FLAG, f"--set {name}"))
    for each, value in flattened(flags):
        given.lay(each, value, Origin(SettingSource.FLAG, flag_name(each)))
        if not is_known(model, each):
            flaws.append(f"{flag_name(each)}: there is no setting {'.'.join(each)}{nearest_names((section, *each))}")
    if flaws:
        raise ConfigError("; ".join(flaws))
    try:
        settings = model.model_validate(given.tables())
    except ValidationError as error:
        raise ConfigError("; ".join(_sentences(error, given))) from error
    return LoadedSettings(settings, path, given.origins)


def service_settings(file: Path | None, flags: Mapping[str, object]) -> ServiceSettings:
    """Return the settings of a service.

    Raises:
        ConfigError: as ``read_settings``.
    """
    return read_settings(ServiceSettings, file, flags).settings


def cache_settings(file: Path | None = None) -> EmbeddedSettings:
    """Return the settings of a cache that an engine embeds, from ``file``, else ``unified-cache.toml``, and variables.

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a value makes no sense; one line says where.
    """
    return read_settings(EmbeddedSettings, file).settings


def _lay_file(given: GivenValues, file: TomlFile, section: str) -> None:
    """Take what a file says to a section: what stands at its top, and over that what stands in its table."""
    inner = file.values.get(section)
    for path, value in flattened(file.values):
        if path[0] not in SECTIONS and is_known(SECTIONS[section], path):
            given.lay(path, value, Origin(SettingSource.FILE, file.place(path)))
    for path, value in flattened(inner) if isinstance(inner, Mapping) else ():
        given.lay(path, value, Origin(SettingSource.FILE, file.place((section, *path))))


def _unknown_in(file: TomlFile) -> Iterator[str]:
    """Yield a sentence for every name that no section has, and for a section that is no table."""
    for path, value in flattened(file.values):
        models = [SECTIONS[path[0]]] if path[0] in SECTIONS else SECTIONS.values()
        inner = path[1:] if path[0] in SECTIONS else path
        name = ".".join(path)
        if not inner and value != {}:
            yield f"{file.place(path)}: {name} must be a table, such as [{name}], found {value!r}"
        elif inner and not any(is_known(model, inner) for model in models):
            yield f"{file.place(path)}: there is no setting {name}{nearest_names(path)}"


def _lay_environment(given: GivenValues, environment: Mapping[str, str], section: str) -> Iterator[str]:
    """Take what variables say to a section; yield a sentence for each that names no setting of any."""
    alone = GivenValues()
    for variable in sorted(filter(is_setting_variable, environment)):
        owner, path = named_by_variable(variable)
        if not path:
            yield f"{variable}: there is no setting of this name{nearest_variables(variable)}"
        elif owner in (None, section) and is_known(SECTIONS[section], path):
            value = _read_text(environment[variable])
            for inner, each in flattened({path[-1]: value}, path[:-1]):
                (alone if owner else given).lay(inner, each, Origin(SettingSource.VARIABLE, variable))
    given.lay_all(alone)


def _read_text(text: str) -> object:
    """Return a table or a list that a variable has as JSON; other text as it is."""
    if text[:1] in ("{", "["):
        try:
            return parse_json(text)
        except ValueError:
            return text  # such as an IPv6 address in brackets
    return text


def _sentences(error: ValidationError, given: GivenValues) -> Iterator[str]:
    """Yield a sentence for every flaw: where, which setting, what was expected, what was found."""
    for flaw in error.errors(include_url=False):
        path = tuple(each for each in flaw["loc"] if isinstance(each, str))
        reason = _reason(flaw)
        if flaw["type"] in _OF_SEVERAL:
            place = given.place((*path, *reason.split(" ", 1)[0].split(".")))
            yield ": ".join(part for part in (place, ".".join(path), reason) if part)
            continue
        place = given.place(path)
        found = "" if flaw["type"] == "missing" else f", found {_shown(flaw['input'])}"
        named = place if place.startswith("--") else f"{place}: {'.'.join(path)}" if place else ".".join(path)
        instead = value_instead(flaw["input"]) if flaw["type"] == "enum" else ""
        yield f"{named} {reason}{found}{instead}"


def _reason(flaw: ErrorDetails) -> str:
    """Return what was expected, in the words of a file."""
    limits = flaw.get("ctx", {})
    if flaw["type"] == "greater_than" and isinstance(limits["gt"], int) and limits["gt"] == 0:
        return "must be at least 1"
    for kind, limit, words in (
        ("greater_than_equal", "ge", "must be at least"),
        ("less_than_equal", "le", "must be at most"),
        ("greater_than", "gt", "must be more than"),
        ("less_than", "lt", "must be less than"),
    ):
        if flaw["type"] == kind:
            return f"{words} {limits[limit]}"
    reason = _WORDS.get(flaw["type"], flaw["msg"].removeprefix("Value error, "))
    return reason.replace("Input should be", "must be").partition(", unable to parse")[0]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}.."
