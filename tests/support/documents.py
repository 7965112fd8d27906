"""Commands that documents show."""

import re
import shlex
from collections.abc import Iterator

__all__ = ["shell_commands"]

BLOCK = re.compile(r"^```(?:console|bash|sh|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROMPT = "$ "


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in blocks of Markdown that show commands alone, and not what they print.

    A line without a prompt belongs to the command above it.
    """
    for block in BLOCK.findall(text):
        for shown in block.split(f"\n{PROMPT}"):
            yield shlex.split(shown.removeprefix(PROMPT).replace("\\\n", " "), comments=True)
