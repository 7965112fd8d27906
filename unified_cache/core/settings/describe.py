"""Settings as they are described: name, kind, default and meaning of each, for help, documents and ``config check``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

from unified_cache.core.byte_sizes import bytes_literal
from unified_cache.core.config import CacheConfig
from unified_cache.core.settings.section import Section, Settings
from unified_cache.core.settings.toml import SettingPath

__all__ = ["ANY_NAME", "UNSET", "Setting", "is_known", "setting_named", "settings_of"]

ANY_NAME = "NAME"
"""Placeholder of a name that the user chooses, such as that of a tenant."""

UNSET = "unset"

_KINDS = {"boolean": "true or false", "integer": "count", "number": "number", "string": "text"}

_Schema = Mapping[str, object]


class _OfLibrary(Section):
    """Values of the library whose fields are described there."""

    config: CacheConfig | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of one section."""

    name: str
    """Name with its tables before it, as in ``limits.calls_max``."""
    kind: str
    default: object
    """Value where nothing else is said; None for none."""
    meaning: str
    values: tuple[str, ...] = ()
    """All there are, where there are few."""

    @property
    def path(self) -> SettingPath:
        """Names of its tables, and its own."""
        return tuple(self.name.split("."))

    @property
    def default_text(self) -> str:
        """Default in words."""
        if self.default is None or self.default == ():
            return UNSET
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.kind == "bytes" and isinstance(self.default, int):
            return bytes_literal(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@cache
def settings_of(model: type[Settings]) -> tuple[Setting, ...]:
    """Return all settings of a section, in its order."""
    schema = model.model_json_schema()
    return tuple(_settings(schema, _definitions(schema), (), {}))


def setting_named(model: type[Settings], name: str) -> Setting:
    """Return the setting of a section that has this name."""
    return {each.name: each for each in settings_of(model)}[name]


def is_known(model: type[Settings], path: SettingPath) -> bool:
    """Return whether a section has a setting or a table at a path, whatever its value."""
    return any(_leads(each.path, path) for each in settings_of(model))


def _leads(known: SettingPath, path: SettingPath) -> bool:
    return all(name in (found, ANY_NAME) for name, found in zip(known, path, strict=False))


def _settings(
    schema: _Schema, definitions: Mapping[str, _Schema], path: SettingPath, defaults: Mapping[str, object]
) -> Iterator[Setting]:
    properties = cast("Mapping[str, _Schema]", schema.get("properties", {}))
    for name, described in properties.items():
        node = _resolved(described, definitions)
        here = (*path, name)
        default = defaults.get(name, described.get("default"))
        inner = default if isinstance(default, Mapping) else {}
        if "properties" in node:
            yield from _settings(node, definitions, here, inner)
        elif node.get("type") == "object":
            entry = next(iter(cast("Mapping[str, _Schema]", node.get("patternProperties", {})).values()), None)
            entry = _resolved(entry or cast("_Schema", node["additionalProperties"]), definitions)
            yield from _settings(entry, definitions, (*here, ANY_NAME), {})
        else:
            meaning = str(described.get("description", "" if path else _meaning_in_library(name)))
            values = tuple(map(str, cast("list[object]", node.get("enum", []))))
            shown = tuple(default) if isinstance(default, list) else default
            yield Setting(".".join(here), _kind(node, definitions), shown, " ".join(meaning.split()), values)


def _resolved(node: _Schema, definitions: Mapping[str, _Schema]) -> _Schema:
    """Return the type of a node: the one beside null, or the one that a reference names."""
    for choice in cast("list[_Schema]", node.get("anyOf", [])):
        if choice.get("type") != "null":
            return _resolved(choice, definitions)
    reference = node.get("$ref")
    return node if reference is None else definitions[str(reference).rpartition("/")[2]]


def _kind(node: _Schema, definitions: Mapping[str, _Schema]) -> str:
    if "enum" in node:
        return "one of"
    if "format" in node:
        return str(node["format"])
    if node.get("type") == "array":
        return f"list of {_kind(_resolved(cast('_Schema', node['items']), definitions), definitions)}"
    return _KINDS.get(str(node.get("type")), "value")


def _definitions(schema: _Schema) -> Mapping[str, _Schema]:
    return cast("Mapping[str, _Schema]", schema.get("$defs", {}))


def _meaning_in_library(name: str) -> str:
    described = cast("Mapping[str, _Schema]", _library()["properties"]).get(name, {})
    return str(described.get("description", ""))


@cache
def _library() -> _Schema:
    return _definitions(_OfLibrary.model_json_schema())["CacheConfig"]
