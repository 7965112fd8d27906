"""Blocks of code, and the commands among them, that documents show."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["CodeBlock", "code_blocks", "command_lines", "shell_commands"]

BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELLS = frozenset({"console", "bash", "sh", "shell"})
PROMPT = "$ "


class CodeBlock(NamedTuple):
    """Text of a fenced block of Markdown, without the block's own indentation."""

    language: str
    text: str


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the blocks that name their language, in order."""
    for indentation, language, body in BLOCK.findall(text):
        yield CodeBlock(language, re.sub(f"^{indentation}", "", body, flags=re.MULTILINE))


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in blocks of Markdown that show commands alone, and not what they print.

    A line without a prompt belongs to the command above it.
    """
    for block in code_blocks(text):
        if block.language in SHELLS:
            for shown in block.text.split(f"\n{PROMPT}"):
                yield shlex.split(shown.removeprefix(PROMPT).replace("\\\n", " "), comments=True)


def command_lines(block: CodeBlock) -> Iterator[list[str]]:
    """Yield the words of each command of a block in which a command is a line, or several that end in a backslash.

    Where some lines have a prompt, those without one are what a command prints.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    is_prompted = any(line.startswith(PROMPT) for line in lines)
    for line in lines:
        if line.startswith(PROMPT) or not is_prompted:
            words = shlex.split(line.removeprefix(PROMPT), comments=True)
            if words:
                yield words
