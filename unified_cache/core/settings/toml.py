"""Settings as a file of TOML, written, and read with the line of each value."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tomllib import TOMLDecodeError, loads

from pydantic import BaseModel

from unified_cache.core.errors import ConfigError
from unified_cache.core.files import read_up_to
from unified_cache.core.nesting import parse_toml

__all__ = ["SettingPath", "TomlFile", "as_toml", "flattened", "quoted", "read_toml", "toml_literal"]

SettingPath = tuple[str, ...]
"""Names of the tables that a value lies in, and its own."""

SETTINGS_BYTES_MAX = 1 << 20
"""Quotas of some ten thousand tenants."""
_LAST_LINE_ENDS = ("]", '"""', "'''")
"""The last line of a value of several lines has one of these."""
_PLACE = re.compile(r" ?\(at line (\d+), column \d+\)|\(at end of document\)")


@dataclass(frozen=True, slots=True)
class TomlFile:
    """Values of a file, and the place of each."""

    path: Path
    values: Mapping[str, object]
    lines: Mapping[SettingPath, int]
    """Line of every value and table, from 1."""

    def place(self, path: SettingPath) -> str:
        """Return ``FILE:LINE`` of a value, or of the table that it would stand in."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.path}:{self.lines[path[:length]]}"
        return str(self.path)


def read_toml(path: Path) -> TomlFile:
    """Read a file; a ConfigError says where, and what was found, if it cannot be read or is no TOML."""
    if path.is_dir():
        raise ConfigError(f"{path}: expected a file of TOML, found a directory; name the file in it")
    try:
        text = read_up_to(path, SETTINGS_BYTES_MAX).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected TOML in UTF-8, found byte {error.object[error.start]:#04x}") from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: expected a file of settings, found none; unified-cache config init prints one"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: expected a file that can be read, found: {error.strerror}") from error
    try:
        return TomlFile(path, parse_toml(text), dict(_lines(text)))
    except ValueError as error:
        found = _PLACE.search(str(error))
        line = f":{found[1]}" if found is not None and found[1] else f":{text.count(chr(10)) + 1}"
        reason = _PLACE.sub("", str(error)).strip()
        raise ConfigError(f'{path}{line}: expected TOML, such as name = "text", found: {reason}') from error


def _lines(text: str) -> Iterator[tuple[SettingPath, int]]:
    """Yield the line of every value and table of a text that is TOML: its statements are parsed one by one."""
    table: SettingPath = ()
    statement: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not statement and not line.strip():
            continue
        statement.append(line)
        if len(statement) > 1 and not any(end in line for end in _LAST_LINE_ENDS):
            continue
        try:
            found = loads("\n".join(statement))
        except TOMLDecodeError:
            continue  # a list or a text that goes on in the next line
        start = number - len(statement) + 1
        header = statement[0].lstrip().startswith("[")
        statement = []
        paths = [path for path, _ in flattened(found)]
        if header:
            table = paths[0] if paths else ()
        for path in paths:
            whole = path if header else (*table, *path)
            yield from ((whole[:length], start) for length in range(len(whole) - len(path) + 1, len(whole) + 1))


def flattened(values: Mapping[str, object], prefix: SettingPath = ()) -> Iterator[tuple[SettingPath, object]]:
    """Yield every value with its path; an empty table is one."""
    for name, value in values.items():
        path = (*prefix, name)
        if isinstance(value, Mapping) and value:
            yield from flattened(value, path)
        else:
            yield path, value


def as_toml(settings: BaseModel) -> str:
    """Write settings as a file that gives them, secrets in URLs apart; an unset one becomes a comment."""
    return "\n".join(_tables(settings.model_dump(mode="json"))) + "\n"


def _tables(values: Mapping[str, object], name: str = "") -> list[str]:
    """Return the lines of a file with these values; None becomes a comment."""
    lines = [f"[{name}]"] if name else []
    tables: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            tables += ["", *_tables(value, f"{name}.{quoted(key)}" if name else quoted(key))]
        else:
            lines.append(f"# {key} is unset" if value is None else f"{quoted(key)} = {toml_literal(value)}")
    return lines + tables


def quoted(key: str) -> str:
    """Return a key as a file has it."""
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else toml_literal(key)


def toml_literal(value: object) -> str:
    """Return a value as a file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_literal, value))}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text) + '"'
