"""Authentication of the live page, and whether it shows tenants."""

import hmac
import secrets
from collections import OrderedDict
from enum import Enum
from hashlib import sha256
from typing import Protocol

from unified_cache.core.errors import ConfigError

__all__ = ["LiveAuthenticator", "OpenAuthenticator", "Sessions", "TokenAuthenticator", "View"]

TOKEN_CHARACTERS_MIN = 16
"""Shorter ones could be guessed."""

SESSIONS_MAX = 256
"""Signed-in browsers; one more signs the first out."""


class View(Enum):
    """Figures that a reader may see."""

    FIGURES = "figures"
    EVERYTHING = "everything"
    """Tenants too."""


class LiveAuthenticator(Protocol):
    """Authentication of readers. Thread-safe."""

    @property
    def needs_token(self) -> bool:
        """Whether a reader has to show a token; if not, names of this machine alone are answered to."""
        ...

    def view(self, token: str | None) -> View | None:
        """Return what the holder of a token may see; None for nothing. None stands for no token."""
        ...


class OpenAuthenticator:
    """Authenticator of a page on loopback: everybody on this machine may see everything."""

    __slots__ = ()

    @property
    def needs_token(self) -> bool:
        """False."""
        return False

    def view(self, token: str | None) -> View | None:
        """Return everything."""
        return View.EVERYTHING


class TokenAuthenticator:
    """Authenticator with one token, whose holder may see everything."""

    __slots__ = ("_digest",)

    def __init__(self, token: str) -> None:
        """Keep the digest of a token.

        Raises:
            ConfigError: it is too short to be a secret.
        """
        if len(token) < TOKEN_CHARACTERS_MIN:
            raise ConfigError(
                f"the token of a live page must have at least {TOKEN_CHARACTERS_MIN} characters, found {len(token)}; "
                f"secrets.token_urlsafe() makes one"
            )
        self._digest = sha256(token.encode("utf-8", "surrogatepass")).digest()

    @property
    def needs_token(self) -> bool:
        """True."""
        return True

    def view(self, token: str | None) -> View | None:
        """Return everything for the token, nothing for any other; in the same time."""
        shown = sha256((token or "").encode("utf-8", "surrogatepass")).digest()
        return View.EVERYTHING if hmac.compare_digest(shown, self._digest) else None


class Sessions:
    """Browsers that have shown a token, by the random name in their cookie. For one thread."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, str] = OrderedDict()

    def begin(self, token: str) -> str:
        """Remember a token; return the name of the session."""
        name = secrets.token_urlsafe()
        self._tokens[name] = token
        if len(self._tokens) > SESSIONS_MAX:
            self._tokens.popitem(last=False)
        return name

    def token(self, name: str) -> str | None:
        """Return the token of a session; None if there is no such session."""
        return self._tokens.get(name)
