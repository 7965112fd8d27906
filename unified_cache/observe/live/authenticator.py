"""Authentication of the live page, and whether it shows tenants."""

import hmac
from enum import Enum
from hashlib import sha256
from typing import Protocol

from unified_cache.core.errors import ConfigError

__all__ = ["LiveAuthenticator", "OpenAuthenticator", "TokenAuthenticator", "View"]

TOKEN_CHARACTERS_MIN = 16
"""Shorter ones could be guessed."""


class View(Enum):
    """Figures that a reader may see."""

    FIGURES = "figures"
    EVERYTHING = "everything"
    """Tenants too."""


class LiveAuthenticator(Protocol):
    """Authentication of readers. Thread-safe."""

    needs_token: bool
    """Whether a reader has to show a token; if not, names of this machine alone are answered to."""

    def view(self, token: str | None) -> View | None:
        """Return what the holder of a token may see; None for nothing. None stands for no token."""
        ...


class OpenAuthenticator:
    """Authenticator of a page on loopback: everybody on this machine may see everything."""

    needs_token = False

    def view(self, token: str | None) -> View | None:
        """Return everything."""
        return View.EVERYTHING


class TokenAuthenticator:
    """Authenticator with one token, whose holder may see everything."""

    needs_token = True

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

    def view(self, token: str | None) -> View | None:
        """Return everything for the token, nothing for any other; in the same time."""
        shown = sha256((token or "").encode("utf-8", "surrogatepass")).digest()
        return View.EVERYTHING if hmac.compare_digest(shown, self._digest) else None
