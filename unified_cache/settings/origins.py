"""Values that were given for settings, each with where it came from, laid over one another."""

from dataclasses import dataclass, field
from enum import Enum

from unified_cache.settings.toml import SettingPath

__all__ = ["GivenValues", "Origin", "SettingSource"]


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


@dataclass(slots=True)
class GivenValues:
    """Values by path, and the origin of each."""

    values: dict[SettingPath, object] = field(default_factory=dict)
    origins: dict[SettingPath, Origin] = field(default_factory=dict)

    def lay(self, path: SettingPath, value: object, origin: Origin) -> None:
        """Put a value over what was given before; an empty table takes nothing away."""
        if value == {} and any(_is_in(path, each) for each in self.values):
            return
        for each in [each for each in self.values if _is_in(path, each) or _is_in(each, path)]:
            del self.values[each], self.origins[each]
        self.values[path] = value
        self.origins[path] = origin

    def lay_all(self, later: "GivenValues") -> None:
        """Put all values of another over these."""
        for path, value in later.values.items():
            self.lay(path, value, later.origins[path])

    def tables(self) -> dict[str, object]:
        """Return the values as tables in tables."""
        whole: dict[str, object] = {}
        for path, value in self.values.items():
            table = whole
            for name in path[:-1]:
                inner = table.setdefault(name, {})
                assert isinstance(inner, dict)
                table = inner
            table[path[-1]] = value
        return whole

    def place(self, path: SettingPath) -> str:
        """Return where a value was given, or the table around it, or something in it; empty where nothing was."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]].place
        inside = (origin.place for each, origin in self.origins.items() if path and _is_in(path, each))
        return next(inside, "")


def _is_in(table: SettingPath, path: SettingPath) -> bool:
    return path[: len(table)] == table
