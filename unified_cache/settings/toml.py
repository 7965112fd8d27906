"""Settings as a file of TOML."""

from collections.abc import Mapping

from pydantic import BaseModel

__all__ = ["as_toml"]


def as_toml(settings: BaseModel) -> str:
    """Write the settings as a file that gives the same settings; what is unset stands as a comment."""
    return "\n".join(_table("", settings.model_dump(mode="json"))) + "\n"


def _table(name: str, values: Mapping[str, object]) -> list[str]:
    lines = [f"[{name}]"] if name else []
    tables: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            tables += ["", *_table(f"{name}.{_quoted(key)}" if name else _quoted(key), value)]
        else:
            lines.append(f"# {key} is unset" if value is None else f"{_quoted(key)} = {_literal(value)}")
    return lines + tables


def _quoted(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _literal(key)


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text) + '"'
