"""Blocks of code that documents show, the commands among them, and what each block says of how it is run.

Behind its language a block says ``run=NAME``, a runner's, or ``skip="REASON"``. One that says nothing is run as it
stands by ``tests/e2e/test_documents.py``.
"""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.sources import ROOT, repository_files

BLOCK = re.compile(r"^( *)```(\w+)(?: +(run|skip)=(?:\"([^\"]+)\"|(\S+)))?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELLS = frozenset({"console", "bash", "sh", "shell"})
PROMPT = "$ "


class CodeBlock(NamedTuple):
    """Text of a fenced block of Markdown, without the block's own indentation."""

    language: str
    text: str
    runner: str = ""
    skipped_because: str = ""

    @property
    def is_shell(self) -> bool:
        """Whether its text is commands."""
        return self.language in SHELLS


def documents() -> list[str]:
    """Return the paths of the documents that are for users."""
    return [path for path in repository_files() if re.fullmatch(r"(docs/)?[^/]+\.md", path)]


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the blocks that name their language, in order."""
    for indentation, language, attribute, quoted, bare, body in BLOCK.findall(text):
        said = {"run": ("", ""), "skip": ("", "")} | {attribute: (quoted or bare,)}
        yield CodeBlock(
            language, re.sub(f"^{indentation}", "", body, flags=re.MULTILINE), said["run"][0], said["skip"][0]
        )


def blocks_run_by(runner: str, languages: frozenset[str] = SHELLS) -> list[CodeBlock]:
    """Return the blocks of all documents that name a runner, in one of some languages."""
    texts = ((ROOT / path).read_text(encoding="utf-8") for path in documents())
    return [
        block for text in texts for block in code_blocks(text) if block.runner == runner and block.language in languages
    ]


def program_of(text: str) -> str:
    """Join the python blocks that say nothing, each line where it stands, so that tracebacks name its lines."""
    program = ""
    for found in BLOCK.finditer(text):
        if found[2] == "python" and not found[3]:
            lines_before = text.count("\n", 0, found.start(6))
            program += "\n" * (lines_before - program.count("\n")) + found[6]
    return program


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in the shell blocks of Markdown."""
    for block in code_blocks(text):
        if block.is_shell:
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
