"""Two results of replays held against each other: figures side by side, and the settings in which they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unified_cache.byte_sizes import bytes_text
from unified_cache.errors import ConfigError
from unified_cache.nesting import parse_json

__all__ = ["FigurePair", "KeptResult", "SettingPair", "compared_figures", "compared_settings", "read_result"]

RATIOS = ("token_hit_ratio", "block_hit_ratio", "seen_block_ratio")
"""Figures of a whole run that are shares."""


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The result of a replay as its JSON file has it."""

    ratios: Mapping[str, float]
    """Shares by name: of tokens and blocks, and of the tokens that each tier handed back."""
    moved_bytes: Mapping[str, int]
    """Payload by kind of transfer."""
    requests_per_s: float
    settings: Mapping[str, str]
    """By name, those of nested values joined by dots, the trace and its requests first; as text."""


@dataclass(frozen=True, slots=True)
class FigurePair:
    """One figure of two runs, as numbers and in words."""

    name: str
    first: float
    second: float
    texts: tuple[str, str, str]
    """First, second, and the change."""


@dataclass(frozen=True, slots=True)
class SettingPair:
    """One setting in which two runs differ."""

    name: str
    first: str
    second: str


def read_result(path: Path) -> KeptResult:
    """Read what ``unified-cache replay --json-file`` wrote.

    Raises:
        ConfigError: the file is no such result; it says what is missing.
        OSError: it cannot be read.
    """
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} must hold the JSON of a replay, found something else: {error}") from error
    try:
        return _result_in(_mapping(found, "the whole"))
    except KeyError as error:
        raise ConfigError(f"{path} must hold the JSON of a replay, it has no {error.args[0]}") from error


def _result_in(found: Mapping[str, object]) -> KeptResult:
    tokens = _number(found["tokens"], "tokens")
    ratios = {ratio: _number(found[ratio], ratio) for ratio in RATIOS}
    for tier, hit_tokens in _mapping(found["hit_tokens"], "hit_tokens").items():
        ratios[f"{tier}_hit_ratio"] = _number(hit_tokens, tier) / tokens if tokens else 0.0
    moved = _mapping(found["bytes_moved"], "bytes_moved")
    return KeptResult(
        ratios=ratios,
        moved_bytes={kind: int(_number(count, kind)) for kind, count in moved.items()},
        requests_per_s=_number(found["requests_per_s"], "requests_per_s"),
        settings={
            "trace": str(found["trace"]),
            "requests": str(int(_number(found["requests"], "requests"))),
            **dict(_flat(_mapping(found["settings"], "settings"))),
        },
    )


def compared_figures(first: KeptResult, second: KeptResult) -> list[FigurePair]:
    """Return the figures of two runs, those first by which caches are judged; what one run lacks is 0."""
    pairs: list[FigurePair] = []
    for name in dict.fromkeys([*first.ratios, *second.ratios]):
        one, other = first.ratios.get(name, 0.0), second.ratios.get(name, 0.0)
        texts = (f"{one:.2%}", f"{other:.2%}", f"{(other - one) * 100:+.2f} points")
        pairs.append(FigurePair(name, one, other, texts))
    for kind in dict.fromkeys([*first.moved_bytes, *second.moved_bytes]):
        one_bytes, other_bytes = first.moved_bytes.get(kind, 0), second.moved_bytes.get(kind, 0)
        change = f"{other_bytes / one_bytes - 1:+.1%}" if one_bytes else ""
        texts = (bytes_text(one_bytes), bytes_text(other_bytes), change)
        pairs.append(FigurePair(f"{kind}_bytes", one_bytes, other_bytes, texts))
    rates = (first.requests_per_s, second.requests_per_s)
    change = f"{rates[1] / rates[0] - 1:+.1%}" if rates[0] else ""
    pairs.append(FigurePair("requests_per_s", *rates, (f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", change)))
    return pairs


def compared_settings(first: KeptResult, second: KeptResult) -> list[SettingPair]:
    """Return the settings in which two runs differ; what one of them does not have is ``none``."""
    one, other = first.settings, second.settings
    pairs = (SettingPair(name, one.get(name, "none"), other.get(name, "none")) for name in {**one, **other})
    return [pair for pair in pairs if pair.first != pair.second]


def _flat(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(_mapping(value, name), f"{before}{name}.")
        else:
            yield f"{before}{name}", "none" if value is None else str(value)


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} of a replay's result must be an object, found {str(value)[:60]!r}")
    return {str(key): each for key, each in value.items()}


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} of a replay's result must be a number, found {str(value)[:60]!r}")
    return value
