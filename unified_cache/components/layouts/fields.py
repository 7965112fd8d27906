"""Read a model's configuration field by field; what is missing or makes no sense is an error that names the field."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

from unified_cache.core.errors import LayoutError
from unified_cache.core.files import parse_json

CONFIG_BYTES_MAX = 1 << 24
"""Largest config.json that is read; published ones have some kilobytes, lists of quantised modules some hundred."""
COUNT_MAX = (1 << 30) - 1
"""Largest number believed of any field."""
LAYERS_MAX = 4096
"""Most layers believed of any model."""


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a configuration. A field that is null counts as absent, as in transformers.

    What reads a field raises LayoutError if it is another thing, or is absent without a default.
    """

    values: Mapping[str, object]
    path: str = ""
    """Path of the object in the whole configuration, with a dot at the end; empty for the whole."""

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, expected: str) -> LayoutError:
        """Return, for raising, the error that ``name`` should be ``expected`` and is not."""
        found = short(self.values[name]) if name in self.values else "none"
        return LayoutError(f"{self.path}{name} must be {expected}, found {found}")

    def one_of(self, names: Collection[str]) -> str:
        """Return the first of ``names`` that is present; the first of all if none is, for an error to name it."""
        return next((name for name in names if name in self), next(iter(names)))

    def count(self, name: str, default: int | None = None, most: int = COUNT_MAX) -> int:
        """Return a positive integer."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        # A bool is an int to Python, and a mistake here.
        if type(value) is not int or not 0 < value <= most:
            raise self.error(name, f"a positive integer of at most {most}")
        return value

    def number(self, name: str, default: int) -> int:
        """Return an integer from 0."""
        if name not in self:
            return default
        return 0 if self.holds(name, 0) else self.count(name)

    def text(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "a string")
        return value

    def items(self, name: str) -> list[object]:
        """Return a list."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple):
            raise self.error(name, "a list")
        return list(value)

    def texts(self, name: str, allowed: Collection[str]) -> list[str]:
        """Return a list of words of ``allowed``."""
        found: list[str] = []
        for item in self.items(name):
            if not isinstance(item, str) or item not in allowed:
                raise LayoutError(
                    f"{self.path}{name} must hold nothing but {', '.join(sorted(allowed))}, found {short(item)}"
                )
            found.append(item)
        return found

    def numbers(self, name: str, allowed: Collection[int]) -> list[int]:
        """Return a list of integers of ``allowed``."""
        found: list[int] = []
        for item in self.items(name):
            if type(item) is not int or item not in allowed:
                raise LayoutError(f"{self.path}{name} must hold nothing but {sorted(allowed)}, found {short(item)}")
            found.append(item)
        return found

    def flag(self, name: str) -> bool:
        """Return a boolean; False where it is absent."""
        value = self.values.get(name, False)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return bool(value)

    def inner(self, name: str) -> "Fields":
        """Return a nested object, whose errors say its place."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Fields({str(key): item for key, item in value.items()}, f"{self.path}{name}.")

    def objects(self, name: str) -> list["Fields"]:
        """Return a list of nested objects, whose errors say their place."""
        return [
            Fields({"": item}, f"{self.path}{name}[{place}]").inner("") for place, item in enumerate(self.items(name))
        ]

    def per_layer(self, layers: int) -> list["Fields"]:
        """Return the fields of each layer: these, with what ``per_layer_config`` says of a layer on top."""
        if "per_layer_config" not in self:
            return [self] * layers
        overrides = self.inner("per_layer_config")
        found = [self] * layers
        for name in overrides.values:
            # transformers pads the numbers with zeros to one width.
            if not (name.isascii() and name.isdecimal() and len(name) <= len(str(LAYERS_MAX)) and int(name) < layers):
                raise self.error("per_layer_config", f"an object keyed by layers 0 to {layers - 1}")
            found[int(name)] = self.with_values(overrides.inner(name).values)
        return found

    def with_values(self, values: Mapping[str, object]) -> "Fields":
        """Return these fields with ``values`` in place of their own."""
        return Fields({**self.values, **values}, self.path)

    def with_defaults(self, values: Mapping[str, object]) -> "Fields":
        """Return these fields with ``values`` where they are absent."""
        return self.with_values({name: value for name, value in values.items() if name not in self})

    def with_synonyms(self, synonyms: Mapping[str, Collection[str]]) -> "Fields":
        """Return these fields with each name that is absent taken from the first of its synonyms that is present."""
        found = {
            name: self.values[other]
            for name, others in synonyms.items()
            if name not in self and (other := next((each for each in others if each in self), None)) is not None
        }
        return self.with_values(found)

    def holds(self, name: str, value: object) -> bool:
        """Return whether a field is exactly ``value``; true is not 1."""
        found = self.values.get(name)
        return type(found) is type(value) and found == value

    def of_layers(self, name: str, layers: int, drafts: int = 0) -> None:
        """Check that the list ``name`` has an entry per layer, and maybe one per draft (MTP) layer behind them."""
        found = len(self.items(name))
        if found not in (layers, layers + drafts):
            expected = f"{layers} or {layers + drafts}" if drafts else f"{layers}"
            raise LayoutError(
                f"{self.path}{name} must have {expected} entries, as num_hidden_layers says, found {found}"
            )


def read_config(config: Mapping[str, object] | str | Path) -> Fields:
    """Return the fields of a configuration given as a mapping, as a JSON file, or as a directory with a config.json.

    A config.json without quantization_config has the one of the hf_quant_config.json beside it, as in vLLM 0.33:
    ModelOpt wrote it there before 0.31.

    Raises:
        LayoutError: it is no JSON object, or too large for one of a model.
        OSError: the file cannot be read.
    """
    if isinstance(config, Mapping):
        return Fields(config)
    path = Path(config)
    if path.is_dir():
        path /= "config.json"
    fields, beside = _read_object(path), path.with_name("hf_quant_config.json")
    if path.name == "config.json" and "quantization_config" not in fields and beside.is_file():
        return fields.with_values({"quantization_config": _read_object(beside).values})
    return fields


def _read_object(path: Path) -> Fields:
    with path.open("rb") as file:
        text = file.read(CONFIG_BYTES_MAX + 1)
    if len(text) > CONFIG_BYTES_MAX:
        raise LayoutError(f"{path} must be a {path.name} of at most {CONFIG_BYTES_MAX} bytes, found more")
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise LayoutError(f"{path} must be a JSON file, found something else: {error}") from error
    if not isinstance(parsed, dict):
        raise LayoutError(f"{path} must hold a JSON object, found {short(parsed)}")
    return Fields(parsed)
