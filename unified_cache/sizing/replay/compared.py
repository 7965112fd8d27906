"""Two results of replays held against each other: figures side by side, and the settings in which they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unified_cache.core.byte_sizes import bytes_text
from unified_cache.core.errors import ConfigError
from unified_cache.core.nesting import parse_json
from unified_cache.sizing.report.page import Page, TableSection

__all__ = ["KeptResult", "different_settings", "flat", "page_of", "read_result"]

RATIOS = ("token_hit_ratio", "block_hit_ratio", "seen_block_ratio")
"""Figures of a whole run that are shares."""

NAMED_DIFFERENCE = 0.0005
"""Share of the tokens that four digits behind the point would show."""


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The result of a replay as its JSON file has it."""

    figures: Mapping[str, float]
    """Shares, of tokens and blocks and by tier; payload by kind of transfer; and the rate: those first by which caches
    are judged."""
    settings: Mapping[str, str]
    """By name, those of nested values joined by dots, the trace and its requests first; as text."""


def read_result(path: Path) -> KeptResult:
    """Read what ``unified-cache replay --json-file`` wrote.

    Raises:
        ConfigError: the file is no such result; it says what is missing.
        OSError: it cannot be read.
    """
    try:
        found = _mapping(parse_json(path.read_bytes()), "the whole")
        tokens = _number(found["tokens"], "tokens")
        hit_tokens = _mapping(found["hit_tokens"], "hit_tokens").items()
        moved = _mapping(found["bytes_moved"], "bytes_moved").items()
        return KeptResult(
            figures={
                **{ratio: _number(found[ratio], ratio) for ratio in RATIOS},
                **{f"{tier}_hit_ratio": _number(hits, tier) / tokens if tokens else 0.0 for tier, hits in hit_tokens},
                **{f"{kind}_bytes": _number(count, kind) for kind, count in moved},
                "requests_per_s": _number(found["requests_per_s"], "requests_per_s"),
            },
            settings={
                "trace": str(found["trace"]),
                "requests": str(found["requests"]),
                **dict(flat(_mapping(found["settings"], "settings"))),
            },
        )
    except ValueError as error:
        raise ConfigError(f"{path} must hold the JSON of a replay, found something else: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{path} must hold the JSON of a replay, it has no {error.args[0]}") from error


def different_settings(first: KeptResult, second: KeptResult) -> list[tuple[str, str, str]]:
    """Return the settings in which two runs differ, by name; what one of them does not have is ``none``."""
    names = {**first.settings, **second.settings}
    found = ((name, first.settings.get(name, "none"), second.settings.get(name, "none")) for name in names)
    return [each for each in found if each[1] != each[2]]


def page_of(first: KeptResult, second: KeptResult) -> Page:
    """Return what a comparison says: which of two runs hit more, and by how much, and why."""
    one, other = first.figures["token_hit_ratio"], second.figures["token_hit_ratio"]
    headline = f"Both hit {one:.1%} of the tokens."
    if abs(other - one) >= NAMED_DIFFERENCE:
        more = f"{abs(other - one) * 100:.1f} points {'more' if other > one else 'less'}"
        headline = f"The second hits {other:.1%} of the tokens, {more} than the first with {one:.1%}."
    settings = different_settings(first, second)
    tables = [
        TableSection(
            "Figures", ("figure", "first", "second", "change"), [_row(name, first, second) for name in first.figures]
        )
    ]
    if settings:
        tables.append(TableSection("Settings", ("setting", "first", "second"), settings, text_columns=3))
    return Page(
        title="Two replays",
        headline=headline,
        lead="",
        alarm="",
        charts=[],
        tables=tables,
        notes=[] if settings else ["the settings are the same"],
        settings=[],
    )


def _row(name: str, first: KeptResult, second: KeptResult) -> tuple[str, ...]:
    one, other = first.figures[name], second.figures.get(name, 0.0)
    shown = name.replace("_", " ")
    if name.endswith("_ratio"):
        return shown, f"{one:.2%}", f"{other:.2%}", f"{(other - one) * 100:+.2f} points"
    change = f"{other / one - 1:+.1%}" if one else ""
    if name.endswith("_bytes"):
        return shown, bytes_text(int(one)), bytes_text(int(other)), change
    return shown, f"{one:,.0f}", f"{other:,.0f}", change


def flat(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested values as text, their names joined by dots."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(_mapping(value, name), f"{before}{name}.")
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
