"""Tables of settings: frozen values of which each key is known and each number finite."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    WrapValidator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from unified_cache.core.byte_sizes import parse_bytes
from unified_cache.core.config import EvictionConfig, GuardConfig, Prefetching, Retention
from unified_cache.core.errors import ConfigError, without_secrets
from unified_cache.core.files import expanded
from unified_cache.core.nesting import parse_json

__all__ = [
    "NESTED",
    "NONE",
    "PREFIX",
    "TENANT_PATTERN",
    "Bytes",
    "BytesOrNone",
    "Count",
    "Eviction",
    "FilePath",
    "Guard",
    "PageCounts",
    "PageCountsOrNone",
    "Prefetches",
    "Retained",
    "Seconds",
    "Section",
    "Settings",
    "Texts",
    "read_text",
]

TENANT_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Names that tenants may have."""

NONE = "none"
"""In the place of an address or a URL: there is to be none."""

PREFIX = "UNIFIED_CACHE_"
"""Begin of the variables that are settings."""

NESTED = "__"
"""Between a table and what is in it, in the name of a variable."""

BYTES_MAX = 1 << 60
PAGES_MAX = 2**31 - 2
"""Slots are int32, and slot 0 is the padding sink."""


StoreUrl = Annotated[str, PlainSerializer(without_secrets)]
"""URL of a store; what is written of it has no secrets."""


def _read_number(value: object) -> object:
    """Refuse a truth in the place of a number; pydantic would take it for 0 or 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number")
    return value


def _read_bytes(value: object) -> object:
    try:
        return parse_bytes("a size", value) if isinstance(value, str) else _read_number(value)
    except ConfigError as error:
        raise PydanticCustomError("bytes", "must be bytes as in 4096, 500MB or 4GiB") from error


def read_text(text: str) -> object:
    """Return a table or a list that a text has as JSON; other text as it is."""
    if text[:1] in ("{", "["):
        try:
            return parse_json(text)
        except ValueError:
            return text  # such as an IPv6 address in brackets
    return text


def _listed(value: object) -> object:
    """Read one value as a list of it, and text with commas, or a list as JSON, as a list."""
    value = read_text(value) if isinstance(value, str) else value
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, Sequence) else [_read_number(value)]


def _listed_policies(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {name: _listed(each) if name in ("device", "host") else each for name, each in value.items()}


def _checked(value: object, handler: ModelWrapValidatorHandler[object]) -> object:
    """Build the library's value, which checks itself; its refusal is a flaw of this setting."""
    try:
        return handler(value)
    except ConfigError as error:
        raise PydanticCustomError("library", "{reason}", {"reason": str(error)}) from error


_FINITE = BeforeValidator(_read_number)
_SIZE = BeforeValidator(_read_bytes)

Bytes = Annotated[int, _SIZE, Field(gt=0, le=BYTES_MAX, json_schema_extra={"format": "bytes"})]
BytesOrNone = Annotated[int, _SIZE, Field(ge=0, le=BYTES_MAX, json_schema_extra={"format": "bytes"})]
"""A size that may be 0: there is to be none."""
Count = Annotated[int, _FINITE, Field(gt=0, le=1 << 31)]
Seconds = Annotated[
    float, _FINITE, Field(gt=0.0, le=86_400 * 365, allow_inf_nan=False, json_schema_extra={"format": "seconds"})
]
_PAGES = BeforeValidator(_listed), Field(min_length=1, json_schema_extra={"format": "pages"})
PageCounts = Annotated[tuple[Annotated[int, _FINITE, Field(gt=0, le=PAGES_MAX)], ...], *_PAGES]
"""Pages of each component; one number is that of every component."""
PageCountsOrNone = Annotated[tuple[Annotated[int, _FINITE, Field(ge=0, le=PAGES_MAX)], ...], *_PAGES]
"""Pages of each component, or 0: there are to be none."""

FilePath = Annotated[Path, AfterValidator(expanded)]
"""A path in which ``~`` and ``$NAME`` are replaced."""

Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""One text, or a list."""

_CHECKED = WrapValidator(_checked)
Eviction = Annotated[EvictionConfig, BeforeValidator(_listed_policies), _CHECKED]
Guard = Annotated[GuardConfig, _CHECKED]
Prefetches = Annotated[Prefetching, _CHECKED]
Retained = Annotated[Retention, _CHECKED]


class Section(BaseModel):
    """One table of settings; a key that it does not have is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Settings(BaseSettings):
    """All settings of one command, or of a cache that an engine embeds: its tables, and the settings in none.

    What code makes has the values that it is given, and defaults; ``read_settings`` asks files and variables.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, env_prefix=PREFIX, env_nested_delimiter=NESTED
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the arguments as the only source."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)
