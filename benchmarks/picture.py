"""Draw docs/beside-lmcache.svg of the kept figures of section ``lmcache``: ours and theirs by size of a page.

python -m benchmarks.picture
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "results" / "lmcache.json"
PICTURE = ROOT / "docs" / "beside-lmcache.svg"

_NAME = re.compile(r"(file|packed|grpc): (put|get), pages of (\d+ .iB)")
_OURS = {"file": "file: (ours)", "packed": "packed: (ours)", "grpc": "grpc:// over file: (ours)"}
_CHECKS = (
    "Ours check of every page that they return: length, identity, key, pool and a checksum of all bytes.",
    "LMCache's check nothing. Bare gRPC stores nothing: it moves messages as long as ours.",
)
BAR_WIDTH, BAR_HEIGHT, LEFT, PANEL = 190, 12, 150, 480
"""Of the longest bar, of any bar, of the names beside them, and from one panel to the next, in pixels."""

Rates = dict[str, dict[str, float]]
"""MB/s by size of a page and store."""


def rates_of(figures: list[dict[str, object]]) -> dict[tuple[str, str], Rates]:
    """Return the rates by where the store is and what it does."""
    found: defaultdict[tuple[str, str], Rates] = defaultdict(lambda: defaultdict(dict))
    for figure in figures:
        named = _NAME.fullmatch(str(figure["name"]))
        if named is None:
            continue
        kind, call, size = named.groups()
        rates = found["A service, both ends on one core" if kind == "grpc" else "In one process, one core", call][size]
        rates[_OURS[kind]] = float(str(figure["median"]))
        compared = figure["comparisons"]
        assert isinstance(compared, list)
        rates.update({each["against"]: each["median"] for each in compared})
    return found


def drawn(found: dict[tuple[str, str], Rates]) -> str:
    """Return the picture: a row of panels for each place, with a group of bars for each size."""
    parts: list[str] = []
    top = bottom = 46
    for row, place in enumerate(dict.fromkeys(place for place, _ in found)):
        top = bottom + 26 * (row > 0)
        for column, call in enumerate(("put", "get")):
            left, at = column * PANEL, top
            parts.append(_text(left + 10, at, f"{place}: {call}, MB/s", "bold"))
            most = max(rate for rates in found[place, call].values() for rate in rates.values())
            for size, rates in found[place, call].items():
                at += 18
                parts.append(_text(left + 10, at, f"pages of {size}"))
                for name, rate in sorted(rates.items(), key=lambda each: each[0] not in _OURS.values()):
                    at += BAR_HEIGHT + 3
                    width = max(1, round(rate / most * BAR_WIDTH))
                    fill = "#2a6f97" if name in _OURS.values() else "#b8b8b8"
                    box = f'x="{left + LEFT}" y="{at - 10}" width="{width}" height="{BAR_HEIGHT}"'
                    parts.append(f'<rect {box} fill="{fill}"/>')
                    parts.append(_text(left + LEFT - 5, at, name, anchor="end"))
                    parts.append(_text(left + LEFT + width + 5, at, f"{rate:,.0f}"))
            bottom = max(bottom, at + 10)
    heads = [_text(10, 14 + 14 * number, line) for number, line in enumerate(_CHECKS)]
    size_text = f'width="{2 * PANEL}" height="{bottom + 6}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size_text} font-family="sans-serif" font-size="11" role="img">',
            f"<title>Rates beside LMCache. {escape(' '.join(_CHECKS))}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            *heads,
            *parts,
            "</svg>\n",
        )
    )


def _text(left: int, at: int, text: str, weight: str = "normal", anchor: str = "start") -> str:
    return f'<text x="{left}" y="{at}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(rates_of(json.loads(FIGURES.read_text(encoding="utf-8"))["figures"])), encoding="utf-8")
