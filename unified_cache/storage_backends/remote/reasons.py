"""Codes on the wire for why a page was not read or not stored; both ends use this table."""

from collections.abc import Sequence

from unified_cache.errors import InputError
from unified_cache.storage_backends.protocol import Answer

__all__ = ["put_answers", "read_answer", "read_answers", "reason_of", "reasons_of"]

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


def read_answer(code: int) -> Answer:
    """Return why a page was not read; an unknown code, of a newer server, is a miss."""
    return _ANSWERS.get(code, Answer.MISS)


def read_answers(found: Sequence[int], reasons: bytes, pages_count: int) -> list[Answer]:
    """Return the answers of a look-up: HIT for each byte that is not 0.

    Raises:
        InputError: they are not one for each page.
    """
    codes = _codes(found, reasons, pages_count)
    return [Answer.HIT if there else read_answer(code) for there, code in zip(found, codes, strict=True)]


def put_answers(stored: Sequence[int], reasons: bytes, pages_count: int) -> list[Answer]:
    """Return the answers of a put: STORED for each byte that is not 0.

    Raises:
        InputError: they are not one for each page.
    """
    codes = _codes(stored, reasons, pages_count)
    return [
        Answer.STORED if kept else _ANSWERS.get(code, Answer.DECLINED) for kept, code in zip(stored, codes, strict=True)
    ]


def _codes(answers: Sequence[int], reasons: bytes, pages_count: int) -> bytes:
    codes = reasons or bytes(len(answers))
    if not len(answers) == len(codes) == pages_count:
        raise InputError(f"expected {pages_count} answers, found {len(answers)}, and reasons of {len(codes)}")
    return codes
