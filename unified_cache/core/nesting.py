"""Text that users write as JSON or TOML; one that is nested too deep is an error as any other."""

import json
import tomllib


def parse_json(text: str | bytes) -> object:
    """Return the value of a JSON text; a ValueError if it is none, or nested deeper than Python reads."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError("lists or tables within each other, too deep") from None
    return value


def parse_toml(text: str) -> dict[str, object]:
    """Return the values of a TOML text; a ValueError if it is none, or nested deeper than Python reads."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables within each other, too deep") from None
