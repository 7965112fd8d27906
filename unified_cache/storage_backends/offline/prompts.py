"""Reads prompts from a file, as token ids.

[151, 7, 12]              JSON: one list is one prompt, a list of lists several
[151, 7, 12]              JSON lines: one list, one prompt, a line
[151, 9]
151 7 12                  else: ids with white space between them, one prompt
"""

import json
from collections.abc import Sequence
from pathlib import Path

from unified_cache.core.errors import TokenError
from unified_cache.core.files import parse_json, read_up_to
from unified_cache.core.page import Namespace, Prompt

PROMPTS_BYTES_MAX = 256 << 20
"""40 million token ids."""


def read_prompts(path: Path, page_size: int, namespace: Namespace) -> list[Prompt]:
    """Read a file's prompts, cut to whole pages; TokenError where it holds something else."""
    try:
        text = read_up_to(path, PROMPTS_BYTES_MAX).decode("utf-8").strip()
        found = _json_prompts(text) if text.startswith("[") else [[int(word) for word in text.split()]]
    except ValueError as error:
        raise TokenError(f"{path} must hold token ids as JSON lists or with spaces between, found {error}") from error
    if not any(found):
        raise TokenError(f"{path} must hold token ids, found none")
    prompts: list[Prompt] = []
    for number, tokens in enumerate(found, 1):
        try:
            prompts.append(Prompt.of(tokens, page_size, namespace))
        except TokenError as error:
            raise TokenError(f"{path}, prompt {number}: {error}") from error
    return prompts


def _json_prompts(text: str) -> Sequence[Sequence[int]]:
    """Read one JSON value or, where the text is no single one, one a line."""
    try:
        whole = parse_json(text)
    except json.JSONDecodeError:
        return [_tokens(parse_json(line)) for line in text.splitlines() if line.strip()]
    if isinstance(whole, list) and whole and all(isinstance(each, list) for each in whole):
        return [_tokens(each) for each in whole]
    return [_tokens(whole)]


def _tokens(value: object) -> Sequence[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"{json.dumps(value)[:60]!r}, which is no list of integers")
    return value
