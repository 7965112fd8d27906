"""Tables of settings: frozen values of which each key is known and each number finite."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from unified_cache.core.errors import ConfigError, without_secrets
from unified_cache.core.files import expanded
from unified_cache.core.sizes import parse_bytes

TENANT_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Names that tenants may have."""

BYTES_MAX = 1 << 60
PAGES_MAX = 2**31 - 2
"""Slots are int32, and slot 0 is the padding sink."""


class VariableText(str):
    """Text of a variable, in which a number or a truth is written as text; in a file it is not."""

    __slots__ = ()


def _is_file_text(value: object) -> bool:
    return isinstance(value, str) and not isinstance(value, VariableText)


def _read_number(value: object) -> object:
    """Refuse a truth, and text of a file, in the place of a number; pydantic would take "true" for 1 and "1" for 1."""
    if isinstance(value, bool) or _is_file_text(value):
        raise PydanticCustomError("number", "must be a number")
    return value


def _read_truth(value: object) -> object:
    """Refuse a number, and text of a file, in the place of a truth."""
    if not isinstance(value, bool | str) or _is_file_text(value):
        raise PydanticCustomError("truth", "must be true or false")
    return value


def _read_bytes(value: object) -> object:
    try:
        return parse_bytes("a size", value) if isinstance(value, str) else _read_number(value)
    except ConfigError as error:
        raise PydanticCustomError("bytes", "must be bytes as in 4096, 500MB or 4GiB") from error


def listed(value: object) -> object:
    """Return one value as a list of it, and text with commas as a list."""
    if isinstance(value, str):
        return [VariableText(part.strip()) for part in value.split(",")]
    return value if isinstance(value, Sequence) else [_read_number(value)]


_FINITE = BeforeValidator(_read_number)
_SIZE = BeforeValidator(_read_bytes)
_PAGES = BeforeValidator(listed), Field(min_length=1)

StoreUrl = Annotated[str, PlainSerializer(without_secrets)]
"""URL of a store; what is written of it has no secrets."""
Bytes = Annotated[int, _SIZE, Field(gt=0, le=BYTES_MAX)]
BytesOrNone = Annotated[int, _SIZE, Field(ge=0, le=BYTES_MAX)]
"""A size that may be 0: there is to be none."""
Truth = Annotated[bool, BeforeValidator(_read_truth)]
CountOrNone = Annotated[int, _FINITE, Field(ge=0)]
Count = Annotated[int, _FINITE, Field(gt=0, le=1 << 31)]
Seconds = Annotated[float, _FINITE, Field(gt=0.0, le=86_400 * 365, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, _FINITE, Field(ge=0.0)]
PageCounts = Annotated[tuple[Annotated[int, _FINITE, Field(gt=0, le=PAGES_MAX)], ...], *_PAGES]
"""Pages of each component; one number is that of every component."""
PageCountsOrNone = Annotated[tuple[Annotated[int, _FINITE, Field(ge=0, le=PAGES_MAX)], ...], *_PAGES]
"""Pages of each component, or 0: there are to be none."""
FilePath = Annotated[Path, AfterValidator(expanded)]
"""A path in which ``~`` and ``$NAME`` are replaced."""


class Section(BaseModel):
    """One table of settings; a key that it does not have is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Settings(Section):
    """All settings of a service, or of a cache that an engine embeds: its tables, and the settings in none."""
