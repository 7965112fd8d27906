"""Workload of the demo: conversations under one system prompt, and what evicts their pages between two turns."""

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "QUESTIONS",
    "ConversationTurn",
    "Interruption",
    "first_life",
    "second_life",
    "shown",
    "system_prompt",
    "tokens_of",
]

_RULES = (
    "You are the clerk of a small library of machines. Answer in one line. ",
    "Name the shelf before the book, and the book before the page. ",
    "If a reader asks for what is not there, say so; never invent a book. ",
    "Be kind to those who come late: the door is open until the lamp goes out. ",
    "What was said before in this conversation counts; do not ask for it again. ",
)

QUESTIONS = (
    "Where do I find a map of the harbour?",
    "And one that is older than the lighthouse?",
    "Who has drawn it?",
    "Is there a copy that I may take home?",
    "Then I shall read it here. When do you close?",
)
"""Questions by turn; every user asks all of them."""

PRINTABLE = range(0x20, 0x7F)
BRAILLE = 0x2800
"""Unicode's 256 patterns of eight dots: one for every byte."""


class Interruption(Enum):
    """Event before a user's next turn. Its value is the fastest tier that can still hold the prompt."""

    NONE = "device"
    """Nothing: the user is back at once."""
    CROWD = "host"
    """Other requests have taken every page of the device."""
    RESET = "storage"
    """Device and host have been emptied; a restart does it for all users at once."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One turn of one user."""

    user: int
    turn: int
    hurdle: Interruption


def first_life(users: int) -> list[ConversationTurn]:
    """Return what the first engine serves: each user begins and comes back; later again, after a crowd."""
    begun = [ConversationTurn(user, turn, Interruption.NONE) for user in range(users) for turn in (0, 1)]
    return begun + [ConversationTurn(user, 2, Interruption.CROWD) for user in range(users)]


def second_life(users: int) -> list[ConversationTurn]:
    """Return what the engine after the restart serves, one by one."""
    return [ConversationTurn(user, 3, Interruption.RESET) for user in range(users)]


def system_prompt(tokens_count: int) -> str:
    """Return the text that all conversations begin with, ``tokens_count`` characters long: each is one token."""
    text = "".join(_RULES)
    return (text * (tokens_count // len(text) + 1))[:tokens_count]


def tokens_of(text: str) -> list[int]:
    """Return the token ids of a text: its bytes."""
    return list(text.encode())


def shown(tokens: list[int]) -> str:
    """Return tokens as printable text: ASCII letters as they are, other bytes as Braille patterns."""
    return "".join(chr(token) if token in PRINTABLE else chr(BRAILLE + token) for token in tokens)
