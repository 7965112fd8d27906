"""Names, docstrings and comments of the package use the words of the field, and none of the private ones before."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.sources import ROOT

WORDS = frozenset(
    re.findall(
        r"[a-z]+",
        "lane lanes hole holes told untold hear hears heard whoever anew lend lends lent loan loans errand errands "
        "passage passages door doors ghost ghosts standing foretell foretells foretold foreseen fates saver owed "
        "landing landed forecast knock",
    )
)
"""Words of no name, docstring or comment."""

PHRASES = re.compile(r"(?i)\b(?:lets? go|what (?:came|has come)|told apart|tells? apart|left[ _]alone)\b")
FIRST_WORDS = re.compile(r"(?:Tell|Say|Note|Have|Let)\b")
"""Beginnings of docstrings; the verbs are return, record, make, allow."""

SPARSE = frozenset({"hole", "holes"})
ALLOWED = {f"storage_backends/{name}.py": SPARSE for name in ("directory/disk", "packed/segment", "packed/segments")}
"""Words with another meaning, by file: holes of a sparse file."""


def texts_of(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, of all docstrings and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def flaws_of(source: str, allowed: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield each private word of a source file with its line."""
    banned = WORDS - allowed
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", token.string)
            yield from (f"{token.start[0]}: {token.string}" for part in parts if part.lower() in banned)
    for line, text, is_docstring in texts_of(source):
        found = [word for word in re.findall(r"[a-z]+", text.lower()) if word in banned] + PHRASES.findall(text)
        yield from (f"{line}: {word}" for word in found)
        if is_docstring and FIRST_WORDS.match(text):
            yield f"{line}: {text.split()[0]}"


def test_the_package_has_no_private_words() -> None:
    flaws: list[str] = []
    for path in sorted((ROOT / "unified_cache").rglob("*.py")):
        name = path.relative_to(ROOT / "unified_cache").as_posix()
        flaws += (f"{name}:{flaw}" for flaw in flaws_of(path.read_text("utf-8"), ALLOWED.get(name, frozenset())))
    assert not flaws, f"{len(flaws)} private words:\n" + "\n".join(flaws)


@pytest.mark.parametrize("source", ["def untold(): ...", "class WindowLane: ...", "# told anew", '"""Tell whether."""'])
def test_a_private_word_is_found(source: str) -> None:
    assert list(flaws_of(source))
