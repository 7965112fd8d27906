"""Settings from where they are given: options win over the environment, that over the file, that over the defaults.

A setting at the top of the file is that of a service and of a cache that an engine embeds; in ``[serve]`` or
``[cache]`` it is that of one alone, and wins. Variables are named alike: ``UNIFIED_CACHE_STORAGE`` is ``storage``,
``UNIFIED_CACHE_SERVE_STORAGE`` the same of a service alone, ``UNIFIED_CACHE_GUARD__DEADLINE_S`` is ``deadline_s`` of
``[guard]``.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource

from unified_cache.core.errors import ConfigError, did_you_mean, without_secrets
from unified_cache.core.files import parse_json, parse_toml, read_kept
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.describe import settings_of
from unified_cache.core.settings.section import Section, Settings, VariableText
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.core.sizes import bytes_literal

SECTIONS: Mapping[str, type[Settings]] = MappingProxyType({"cache": EmbeddedSettings, "serve": ServiceSettings})
"""Sections of the file: the settings of a service, and of a cache that an engine embeds."""

FILE_NAME = "unified-cache.toml"
"""Read from the working directory, where no other file is named."""

PREFIX = "UNIFIED_CACHE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"

KEY_MARK = "[key]"
"""Of pydantic, behind the name of what is wrong with a name that users choose."""

SHOWN_MAX = 80
"""Characters of a value that a message shows."""

_OTHERS = re.compile(
    r"UNIFIED_CACHE_(CONFIG|(TEST|SGLANG|VLLM)_\w+"
    # Links that Kubernetes puts into every pod where a Service is called unified-cache.
    r"|SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables with our prefix that are no settings."""

_S = TypeVar("_S", bound=Settings)
_T = TypeVar("_T", bound=Section)
_Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class GivenValues:
    """Values of one source, as tables in tables."""

    values: _Values
    place: Callable[[str], str]
    """Place of a value by its name, as errors and ``config check`` have it."""

    def has(self, path: Sequence[str]) -> bool:
        """Return whether the source has a value or a table at a path."""
        value: object = self.values
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                return False
            value = value[name]
        return True


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[_S]):
    """Settings of one section, and where each came from."""

    settings: _S
    file: Path | None
    given: Sequence[GivenValues]
    """Values of all sources, the one that wins first."""

    def place(self, path: Sequence[str]) -> str:
        """Return the file, the variable or the option that a value came from; ``default`` for none."""
        return next((each.place(".".join(path)) for each in self.given if each.has(path)), "default")


def read_settings(
    model: type[_S], file: Path | None = None, options: _Values = MappingProxyType({})
) -> LoadedSettings[_S]:
    """Read the settings of one section from all sources; ``options`` has values by name, tables as mappings.

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a value makes no sense; one line says where, what
            was expected and what was found.
    """
    path = _find_file(file)
    values = {} if path is None else _read_file(path)
    if flaws := [*_unknown_variables(), *(f"{path}: {flaw}" for flaw in _unknown_at_the_top(values))]:
        raise ConfigError("; ".join(flaws))
    section = next(name for name, each in SECTIONS.items() if each is model)
    top = {name: value for name, value in values.items() if name in model.model_fields}
    inner = values.get(section, {})
    given = [
        GivenValues(options, lambda name: f"--{name.replace('_', '-')}"),
        _variables(model, f"{PREFIX}{section.upper()}_"),
        _variables(model, PREFIX),
        *(GivenValues(each, lambda _: str(path)) for each in (inner, top) if isinstance(each, Mapping)),
    ]
    return LoadedSettings(_validated(model, given), path, given)


def cache_settings(file: Path | None = None) -> EmbeddedSettings:
    """Return the settings of a cache that an engine embeds; file, variables and errors as ``read_settings``."""
    return read_settings(EmbeddedSettings, file).settings


def read_table(model: type[_T], values: _Values, place: str) -> _T:
    """Read one table of settings that an engine hands over; ``place`` says in errors where its user wrote it."""
    return _validated(model, [GivenValues(values, lambda _: place)])


_M = TypeVar("_M", bound=BaseModel)


def _validated(model: type[_M], given: Sequence[GivenValues]) -> _M:
    """Return the settings that these values give, the first source before the others."""
    try:
        return model.model_validate(_merged(*(each.values for each in reversed(given))))
    except ValidationError as error:
        names = [each.name for each in settings_of(model)]
        flaws = [_sentence(flaw, given, names) for flaw in error.errors(include_url=False)]
        raise ConfigError("; ".join(flaws)) from error


def _find_file(named: Path | None) -> Path | None:
    """Return the file of settings: the one named, else that of ``UNIFIED_CACHE_CONFIG``, else that of the directory."""
    if named is not None:
        return named
    if os.environ.get(FILE_VARIABLE):
        return Path(os.environ[FILE_VARIABLE])
    return Path(FILE_NAME) if Path(FILE_NAME).exists() else None


def _read_file(path: Path) -> dict[str, object]:
    """Read a file of TOML. ``TomlConfigSettingsSource`` would take one that is not there for an empty one."""
    try:
        return parse_toml(read_kept(path).decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f'{path}: expected TOML in UTF-8, such as name = "text", found: {error}') from error


class _Variables(EnvSettingsSource):
    """Variables of one prefix; a text that is no JSON stays as it is, and the model says what it expected."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: str) -> object:
        """Return a table or a list that a variable has as JSON."""
        try:
            return parse_json(value)
        except ValueError:
            return value


def _variables(model: type[Settings], prefix: str) -> GivenValues:
    # It reads a class's fields and configuration alone, which those of any model are.
    values = _Variables(cast("type[BaseSettings]", model), env_prefix=prefix, env_nested_delimiter="__")()
    texts = {name: _as_texts(value) for name, value in values.items()}
    return GivenValues(texts, lambda name: f"{prefix}{name.replace('.', '__').upper()}")


def _as_texts(value: object) -> object:
    """Return a value in which every text says that a variable had it."""
    if isinstance(value, Mapping):
        return {name: _as_texts(each) for name, each in value.items()}
    return VariableText(value) if isinstance(value, str) else value


def _merged(*values: _Values) -> dict[str, object]:
    """Return values with later ones over earlier ones, tables name by name."""
    whole: dict[str, object] = {}
    for each in values:
        for name, value in each.items():
            table = whole.get(name)
            if isinstance(table, Mapping) and isinstance(value, Mapping):
                whole[name] = _merged(table, value)
            else:
                whole[name] = value
    return whole


def _unknown_at_the_top(values: _Values) -> Iterator[str]:
    """Yield a sentence for every name that no section has, and for a section that is no table."""
    for name, value in values.items():
        if name in SECTIONS and not isinstance(value, Mapping):
            yield f"{name} must be a table, such as [{name}], found {_shown(value)}"
        known = [*SECTIONS, *(field for model in SECTIONS.values() for field in model.model_fields)]
        if name not in known:
            yield f"there is no setting {name}{did_you_mean(name, known)}"


def _unknown_variables() -> Iterator[str]:
    """Yield a sentence for every variable that begins with the name of no setting; what is in a table, that says."""
    fields = [
        (field, f"{section}_{field}", nested)
        for section, model in SECTIONS.items()
        for field, nested, _ in (each.name.partition(".") for each in settings_of(model))
    ]
    known = {f"{PREFIX}{name}".upper(): nested for *names, nested in fields for name in names}
    written = dict.fromkeys(
        f"{PREFIX}{start}{each.name.replace('.', '__')}".upper()
        for section, model in SECTIONS.items()
        for each in settings_of(model)
        for start in ("", f"{section}_")
    )
    for variable in sorted(os.environ):
        if variable.upper().startswith(PREFIX) and _OTHERS.fullmatch(variable.upper()) is None:
            name, nested, _ = variable.partition("__")
            if name.upper() not in known or (nested and not known[name.upper()]):
                yield f"{variable}: there is no setting of this name{did_you_mean(variable, written)}"


def _sentence(flaw: ErrorDetails, given: Sequence[GivenValues], names: Sequence[str]) -> str:
    """Return a sentence: where a flaw is, which setting has it, what was expected and what was found."""
    path = [each for each in flaw["loc"] if isinstance(each, str) and each != KEY_MARK]
    name, reason = ".".join(path), flaw["msg"].removeprefix("Value error, ")
    limit = next((each for each in flaw.get("ctx", {}).values() if isinstance(each, int)), None)
    if limit is not None and "bytes" in name:
        reason = reason.replace(str(limit), bytes_literal(limit))
    match flaw["type"]:
        case "extra_forbidden":
            text = f"there is no setting {name}{did_you_mean(name, names)}"
        case "missing":
            text = f"{name} must be set"
        case "value_error":
            text = f"{name}: {reason}" if name else reason
            path += reason.partition(" ")[0].split(".")  # settings that contradict each other: the first is named
        case "string_pattern_mismatch":  # the one pattern is that of tenants
            text = f"{name} must be at most 64 of a-z, 0-9 and, not first, . _ -, found {_shown(flaw['input'])}"
        case "int_parsing_size":
            text = f"{name} must be a smaller number, found {_shown(flaw['input'])}"
        case _:
            reason = re.sub(r"^\w+ should", "must", reason).replace("a valid dictionary", "a table")
            text = f"{name} {re.split(', unable to| or instance', reason)[0]}, found {_shown(flaw['input'])}"
    ends = range(len(path), 0, -1)
    places = (each.place(".".join(path[:end])) for end in ends for each in given if each.has(path[:end]))
    place = next(places, "")
    return f"{place}: {text}" if place else text


def _shown(value: object) -> str:
    try:
        text = without_secrets(repr(value))
    except RecursionError:
        return type(value).__name__
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}.."
