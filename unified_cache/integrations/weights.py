"""Names of a local checkpoint: a digest of its bytes, wherever they lie, and what a person knows it by."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_128

from unified_cache.core.errors import ConfigError

PIECE_BYTES = 4 << 20
SUFFIXES = frozenset({".bin", ".gguf", ".pt", ".pth", ".safetensors"})
"""Files that loaders of engines read weights from."""

CONFIG = "config.json"
"""File that says how the weights are used."""


def weights_of(name: str, path: str, said: str, elsewhere: str) -> tuple[str, str]:
    """Return a model's name and the revision of its weights, which lie at ``path``, a directory or a file in one.

    The revision is the user's word, ``said``, if there is one, else a digest of the checkpoint, else ``elsewhere``: a
    path on no machine but a hub's. The path of a checkpoint that is digested names nothing: a model that is called by
    it is called by its architecture, so that the same weights are the same model.

    Raises:
        ConfigError: as ``weights_digest``.
    """
    place = Path(path)
    directory = place.parent if place.is_file() else place
    if said or not path or not directory.is_dir():
        return name, said or elsewhere
    file = f" {place.name}" if place.is_file() else ""
    return checkpoint_name(directory) if name == path else name, f"weights {weights_digest(directory)}{file}"


def weights_digest(directory: Path) -> str:
    """Return a digest of every weight file in a directory, by name and by each byte, 32 hex digits.

    Reads them whole: the loader has just read them too, so they mostly come from the page cache.

    Raises:
        ConfigError: there is no weight file, or one cannot be read.
    """
    names = sorted(path for path in directory.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not names:
        raise ConfigError(f"{directory} must hold weights ({', '.join(sorted(SUFFIXES))}), found none: say revision")
    total = hashlib.sha256()
    for path in names:
        content = xxh3_128()
        try:
            for piece in _pieces(path):
                content.update(piece)
        except OSError as error:
            raise ConfigError(f"cannot read the weights in {path}: {error}; say revision") from error
        total.update(f"{path.relative_to(directory).as_posix()}\n{content.hexdigest()}\n".encode())
    return total.hexdigest()[:32]


def config_digest(directory: Path) -> str:
    """Return a digest of a checkpoint's configuration, 32 hex digits; empty if there is none."""
    path = directory / CONFIG
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.is_file() else ""


def checkpoint_name(directory: Path) -> str:
    """Return the architecture that a checkpoint's configuration names: the same at every path."""
    try:
        (name, *_) = json.loads((directory / CONFIG).read_bytes())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return "checkpoint"
    return str(name)


def _pieces(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file; each piece is good until the next is asked for."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]
