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
    """Yield the words of every command in the shell blocks of Markdown."""
    for block in code_blocks(text):
        if block.language in SHELLS:
            yield from command_lines(block)


def command_lines(block: CodeBlock) -> Iterator[list[str]]:
    """Yield the words of each command of a block, which goes on after a backslash and inside quotes.

    Where some lines have a prompt, those without one are what a command prints.
    """
    lines = iter(block.text.replace("\\\n", " ").splitlines())
    is_prompted = any(line.startswith(PROMPT) for line in block.text.splitlines())
    for line in lines:
        if line.startswith(PROMPT) or not is_prompted:
            command = line.removeprefix(PROMPT)
            while (words := _split(command)) is None:
                command += f"\n{next(lines)}"
            if words:
                yield words


def _split(command: str) -> list[str] | None:
    """Return the words of a command; None if a quotation is open."""
    try:
        return shlex.split(command, comments=True)
    except ValueError:
        return None
