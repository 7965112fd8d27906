"""Settings from where they are given: flags win over the environment, that over the file, and that over the defaults.

A setting at the top of the file is that of a service and of a cache that an engine embeds; in ``[serve]`` or
``[cache]`` it is that of one alone, and wins. Variables are named alike: ``UNIFIED_CACHE_STORAGE`` is ``storage``,
``UNIFIED_CACHE_SERVE_STORAGE`` the same of a service alone, ``UNIFIED_CACHE_GUARD__DEADLINE_S`` is ``deadline_s`` of
``[guard]``.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from unified_cache.core.errors import ConfigError, without_secrets
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.describe import is_known
from unified_cache.core.settings.names import (
    FILE_VARIABLE,
    SECTIONS,
    flag_name,
    is_known_variable,
    is_setting_variable,
    nearest_names,
    nearest_variables,
    section_of,
    variable_name,
)
from unified_cache.core.settings.section import Section, Settings, read_text
from unified_cache.core.settings.toml import SettingPath, TomlFile, flattened, read_toml

__all__ = [
    "FILE_NAME",
    "LoadedSettings",
    "Origin",
    "SettingSource",
    "cache_settings",
    "merged",
    "read_flags",
    "read_settings",
    "read_table",
    "table_of",
]

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

_S = TypeVar("_S", bound=Settings)
_T = TypeVar("_T", bound=Section)


class SettingSource(Enum):
    """Sources of settings; a later one wins."""

    DEFAULT = "default"
    FILE = "file"
    VARIABLE = "variable"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of one value."""

    source: SettingSource
    place: str
    """``FILE:LINE``, the name of a variable or of a flag; ``default``."""


@dataclass(frozen=True, slots=True)
class GivenValues:
    """Values of one source, as tables in tables."""

    source: SettingSource
    values: Mapping[str, object]
    place: Callable[[SettingPath], str]
    """Place of a value or table that is there."""

    def has(self, path: SettingPath) -> bool:
        """Return whether the source has a value or a table at a path, or an empty table around it."""
        value: object = self.values
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                return value == {} and value is not self.values
            value = value[name]
        return True


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[_S]):
    """Settings of one section, and where each came from."""

    settings: _S
    file: Path | None
    given: Sequence[GivenValues]
    """Values of all sources, the one that wins first."""

    def origin(self, path: SettingPath) -> Origin:
        """Return the source of one setting."""
        found = (Origin(each.source, each.place(path)) for each in self.given if each.has(path))
        return next(found, Origin(SettingSource.DEFAULT, SettingSource.DEFAULT.value))


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
    path = _find_file(file, environment)
    found = None if path is None else read_toml(path)
    flaws = [
        *(() if found is None else _unknown_in(found)),
        *_unknown_variables(environment),
        *_unknown_flags(model, flags, assignments),
    ]
    if flaws:
        raise ConfigError("; ".join(flaws))
    pairs = [assignment.partition("=") for assignment in assignments]
    assigned = merged(*(table_of(name.strip(), read_text(text)) for name, _, text in pairs))
    given = [
        GivenValues(SettingSource.FLAG, flags, flag_name),
        GivenValues(SettingSource.FLAG, assigned, lambda path: f"--set {'.'.join(path)}"),
        *(_variables(model, environment, section) for section in (section_of(model), None)),
        *(() if found is None else _tables(model, found)),
    ]
    try:
        settings = model.model_validate(merged(*(each.values for each in reversed(given))))
    except ValidationError as error:
        raise ConfigError("; ".join(_sentences(error, given))) from error
    return LoadedSettings(settings, path, given)


def read_flags(model: type[_S], flags: Mapping[str, object]) -> _S:
    """Return the settings of a command that only its flags set, tables as mappings; errors as ``read_settings``."""
    try:
        return model.model_validate(flags)
    except ValidationError as error:
        given = [GivenValues(SettingSource.FLAG, flags, flag_name)]
        raise ConfigError("; ".join(_sentences(error, given))) from error


def read_table(model: type[_T], values: Mapping[str, object], place: str) -> _T:
    """Read one table of settings that an engine hands over; ``place`` says in errors where its user wrote it."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        given = [GivenValues(SettingSource.FILE, values, lambda _: place)]
        known = ", ".join(model.model_fields)
        unknown = [".".join(map(str, flaw["loc"])) for flaw in error.errors() if flaw["type"] == "extra_forbidden"]
        flaws = [f"{place} may have {known}, found {', '.join(unknown)}"] if unknown else _sentences(error, given)
        raise ConfigError("; ".join(flaws)) from error


def _find_file(named: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the file of settings: the one named, else that of ``UNIFIED_CACHE_CONFIG``, else that of the directory."""
    if named is not None:
        return named
    if environment.get(FILE_VARIABLE):
        return Path(environment[FILE_VARIABLE])
    return Path(FILE_NAME) if Path(FILE_NAME).exists() else None


def cache_settings(file: Path | None = None) -> EmbeddedSettings:
    """Return the settings of a cache that an engine embeds; file, variables and errors as ``read_settings``."""
    return read_settings(EmbeddedSettings, file).settings


class _Variables(EnvSettingsSource):
    """Variables of one prefix; a text that is no JSON stays as it is, and the model says what it expected."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: str) -> object:
        """Return a table or a list that a variable has as JSON."""
        return read_text(value)


def _variables(model: type[Settings], environment: Mapping[str, str], section: str | None) -> GivenValues:
    """Return what variables say to a section: those of all, or those for it alone."""
    texts = {name: environment[name] for name in sorted(filter(is_setting_variable, environment))}
    source = _Variables(model, env_prefix=variable_name((), section))
    source.env_vars = {name.lower(): text for name, text in texts.items()}

    def place(path: SettingPath) -> str:
        """Return the variable of a value, of the table around it, or of something in it."""
        around = [variable_name(path[:end], section) for end in range(len(path), 0, -1)]
        inside = variable_name((*path, ""), section)
        return next(name for name in (*around, *texts) if name in texts and (name in around or name.startswith(inside)))

    return GivenValues(SettingSource.VARIABLE, source(), place)


def _tables(model: type[Settings], file: TomlFile) -> Iterator[GivenValues]:
    """Yield a file's values for a section: those of its table, then those at the top."""
    section = section_of(model)
    inner = file.values.get(section)
    if isinstance(inner, Mapping):
        yield GivenValues(SettingSource.FILE, inner, lambda path: file.place((section, *path)))
    top = {name: value for name, value in file.values.items() if name not in SECTIONS and name in model.model_fields}
    yield GivenValues(SettingSource.FILE, top, file.place)


def table_of(name: str, value: object) -> dict[str, object]:
    """Return a value by its name, in the tables that the name says."""
    first, *rest = name.split(".")
    return {first: table_of(".".join(rest), value) if rest else value}


def merged(*values: Mapping[str, object]) -> dict[str, object]:
    """Return values with later ones over earlier ones, tables name by name."""
    whole: dict[str, object] = {}
    for each in values:
        for name, value in each.items():
            table = whole.get(name)
            if isinstance(table, Mapping) and isinstance(value, Mapping):
                whole[name] = merged(table, value)
            else:
                whole[name] = value
    return whole


def _unknown_in(file: TomlFile) -> Iterator[str]:
    """Yield a sentence for every name that no section has, and for a section that is no table."""
    for path, value in flattened(file.values):
        models = [SECTIONS[path[0]]] if path[0] in SECTIONS else SECTIONS.values()
        inner = path[1:] if path[0] in SECTIONS else path
        name = ".".join(path)
        if not inner and value != {}:
            yield f"{file.place(path)}: {name} must be a table, such as [{name}], found {_shown(value)}"
        elif inner and not any(is_known(model, inner) for model in models):
            yield f"{file.place(path)}: there is no setting {name}{nearest_names(path)}"


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for every variable that names no setting of any section."""
    for variable in sorted(filter(is_setting_variable, environment)):
        if not is_known_variable(variable):
            yield f"{variable}: there is no setting of this name{nearest_variables(variable)}"


def _unknown_flags(model: type[Settings], flags: Mapping[str, object], assignments: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for every flag and ``--set`` that names no setting of the section."""
    named = [(flag_name(path), path) for path, _ in flattened(flags)]
    for assignment in assignments:
        name, equals, _ = assignment.partition("=")
        if equals:
            named.append((f"--set {assignment}", tuple(name.strip().split("."))))
        else:
            yield f"--set {assignment}: must be NAME=VALUE"
    for flag, path in named:
        if not is_known(model, path):
            near = nearest_names((section_of(model), *path))
            yield f"{flag}: there is no setting {'.'.join(path)}{near}"


def _place(path: SettingPath, given: Sequence[GivenValues]) -> str:
    """Return where a value was given, or the table around it; empty where neither was."""
    ends = range(len(path), 0, -1)
    return next((each.place(path[:end]) for end in ends for each in given if each.has(path[:end])), "")


def _sentences(error: ValidationError, given: Sequence[GivenValues]) -> Iterator[str]:
    """Yield a sentence for every flaw: where, which setting, what was expected, what was found."""
    for flaw in error.errors(include_url=False):
        path = tuple(each for each in flaw["loc"] if isinstance(each, str))
        reason = _reason(flaw)
        if flaw["type"] in _OF_SEVERAL:
            place = _place((*path, *reason.split(" ", 1)[0].split(".")), given)
            yield ": ".join(part for part in (place, ".".join(path), reason) if part)
            continue
        place = _place(path, given)
        found = "" if flaw["type"] == "missing" else f", found {_shown(flaw['input'])}"
        named = place if place.startswith("--") else f"{place}: {'.'.join(path)}" if place else ".".join(path)
        yield f"{named} {reason}{found}"


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
    text = without_secrets(repr(value))
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}.."
