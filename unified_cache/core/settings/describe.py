"""Name, default and meaning of each setting, for ``config check``, the document, and errors about unknown names."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from unified_cache.core.settings.section import Section
from unified_cache.core.sizes import bytes_literal

ANY_NAME = "NAME"
"""Placeholder of a name that the user chooses, such as that of a tenant."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of one section."""

    name: str
    """Name with its tables before it, as in ``limits.calls_max``."""
    default: object
    """Value where nothing else is said; None for none."""
    meaning: str

    @property
    def default_text(self) -> str:
        """Default in words."""
        return value_text(self.name, self.default)


def value_text(name: str, value: object) -> str:
    """Return the value of a setting as people read it."""
    if value is None or value in ((), []):
        return "unset"
    if isinstance(value, bool | Enum):
        return str(value.value if isinstance(value, Enum) else value).lower()
    if isinstance(value, int) and "bytes" in name:
        return bytes_literal(value)
    if isinstance(value, list | tuple):
        return ", ".join(value_text(name, each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of(model: type[BaseModel], table: str = "") -> Iterator[Setting]:
    """Yield all settings of a section in its order, those of its tables among them."""
    for name, field in model.model_fields.items():
        inner, choices = _class_in(field.annotation, Section), _class_in(field.annotation, Enum)
        if inner is not None:
            entry = f"{name}.{ANY_NAME}" if get_origin(field.annotation) is dict else name
            yield from settings_of(inner, f"{table}{entry}.")
            continue
        meaning = " ".join((field.description or "").split())
        if choices is not None:
            meaning += f" One of {', '.join(str(each.value) for each in choices)}."
        yield Setting(f"{table}{name}", None if field.default is PydanticUndefined else field.default, meaning)


def _class_in(annotation: object, base: type[_T]) -> type[_T] | None:
    """Return the class in an annotation that is derived from ``base``; None where none is."""
    if isinstance(annotation, type) and issubclass(annotation, base):
        return annotation
    found = (_class_in(each, base) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)
