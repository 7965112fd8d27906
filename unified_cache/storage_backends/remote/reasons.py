"""Codes on the wire for why a page was not read or not stored; both ends use this table."""

from collections.abc import Sequence

from unified_cache.core.errors import InputError
from unified_cache.storage_backends.protocol import Answer

_CODES = {Answer.FLAWED: 1, Answer.UNAVAILABLE: 2}
_ANSWERS = {code: answer for answer, code in _CODES.items()}


def reason_of(answer: Answer) -> int:
    """Return the code of an answer; 0 where there is nothing to add to yes or no."""
    return _CODES.get(answer, 0)


def reasons_of(answers: Sequence[Answer]) -> bytes:
    """Return the code of each answer; nothing at all where all are 0."""
    if not any(answer in answers for answer in _CODES):
        return b""
    return bytes(map(reason_of, answers))


def answer_of(code: int, otherwise: Answer) -> Answer:
    """Return the answer that a code stands for; ``otherwise`` for 0, and for an unknown one of a newer server."""
    return _ANSWERS.get(code, otherwise)


def answers_of(given: Sequence[int], reasons: bytes, pages_count: int, *, yes: Answer, no: Answer) -> list[Answer]:
    """Return the answers of a reply: ``yes`` for each byte that is not 0, else by its reason, or ``no``."""
    codes = reasons or bytes(len(given))
    if not len(given) == len(codes) == pages_count:
        raise InputError(f"expected {pages_count} answers, found {len(given)}, and reasons of {len(codes)}")
    return [yes if there else answer_of(code, no) for there, code in zip(given, codes, strict=True)]
