"""The table of all settings in docs/configuration.md, from the descriptions that flags and ``config check`` have too.

python -m scripts.configuration_table
"""

from pathlib import Path

from unified_cache.core.settings.describe import Setting, settings_of
from unified_cache.core.settings.loading import SECTIONS

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- all settings: python -m scripts.configuration_table -->\n"
END = "<!-- end of all settings -->\n"


def settings_table() -> str:
    """Return the table: a setting that several sections have alike has one row."""
    rows: dict[Setting, list[str]] = {}
    for section, model in SECTIONS.items():
        for setting in settings_of(model):
            rows.setdefault(setting, []).append(section)
    lines = ["| setting | in | default | meaning |", "|---|---|---|---|"]
    for setting, sections in sorted(rows.items(), key=lambda row: ("." in row[0].name, row[0].name)):
        meaning = setting.meaning.replace("``", "`").replace("|", "\\|")
        default = setting.default_text if setting.default_text == "unset" else f"`{setting.default_text}`"
        lines.append(f"| `{setting.name}` | {', '.join(sections)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return the document with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{settings_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
