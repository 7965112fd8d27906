"""Bearer tokens: 256 random bits that stand for a tenant; the server keeps their digests only.

The file has one line for each token::

    ID SHA256 TENANT ROLE EXPIRES

``ID`` is the part of the token that is no secret, ``SHA256`` the digest of all of it in hex, ``EXPIRES`` a date as in
2026-11-21 (the token's last day, UTC) or ``never``. Two tokens of a tenant may hold at the same time, so that one can
be replaced by the other. A file that makes no sense, belongs to another user, or stays locked is a ``ConfigError``; one
that cannot be written is as it was.
"""

import fcntl
import hmac
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path

import grpc

from unified_cache.core.errors import ConfigError
from unified_cache.core.files import check_kept, read_kept, replace_whole
from unified_cache.core.settings.section import TENANT_PATTERN
from unified_cache.core.settings.service import Role
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.reloaded import Reloaded

TENANT_NAME = re.compile(TENANT_PATTERN)
"""Names that a tenant may have, from a token or a certificate."""

_TOKEN = re.compile(r"uc1_([0-9a-f]{16})_[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NEVER = "never"
_AUTHORIZATION = "authorization"
_BEARER = "bearer "
_NOBODY = sha256(b"").digest()
"""Digest that is compared if no token has the ID, so that the answer takes as long."""

_FORBIDDEN = stat.S_IWGRP | stat.S_IWOTH
"""Who else may write a file of tokens could let himself in."""

_LOCK_PAUSE_S = 0.02
_LOCK_ATTEMPTS_MAX = 500
"""Ten seconds in all; the holder of the lock rewrites one small file."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token as the server knows it: its digest, its caller and its last day."""

    token_id: str
    digest: bytes
    """SHA-256 of the token."""
    caller: Caller
    last_day: date | None
    """None if it does not expire."""

    def __str__(self) -> str:
        """Return the line of the file."""
        expires = self.last_day.isoformat() if self.last_day else _NEVER
        return f"{self.token_id} {self.digest.hex()} {self.caller.tenant} {self.caller.role.value} {expires}"


class Tokens:
    """The tokens of a file, asked for callers. Thread-safe. ``wall_clock`` gives seconds since the epoch."""

    def __init__(self, entries: Reloaded[dict[str, TokenEntry]], wall_clock: Callable[[], float]) -> None:
        self._entries = entries
        self._wall_clock = wall_clock

    def caller(self, token: str) -> Caller | None:
        """Return whom a token speaks for; None if it is malformed, unknown or expired, in the same time.

        None for all of them where the file could not be read for too long.
        """
        # One that nobody knows may have been made a moment ago.
        return self._known(token, self._entries.current()) or self._known(token, self._entries.refreshed())

    def _known(self, token: str, read: dict[str, TokenEntry] | None) -> Caller | None:
        entries = read or {}
        found = _TOKEN.fullmatch(token)
        entry = entries.get(found[1]) if found else None
        presented = sha256(token.encode("utf-8", "surrogatepass")).digest()
        if not hmac.compare_digest(presented, entry.digest if entry else _NOBODY) or entry is None:
            return None
        today = datetime.fromtimestamp(self._wall_clock(), UTC).date()
        return None if entry.last_day is not None and entry.last_day < today else entry.caller


def presented_token(context: grpc.ServicerContext) -> str | None:
    """Return the token that a call presents; None if it presents none."""
    presented = [value for key, value in context.invocation_metadata() if key == _AUTHORIZATION]
    if not presented:
        return None
    text = presented[0] if len(presented) == 1 and isinstance(presented[0], str) else ""
    return text[len(_BEARER) :] if text.lower().startswith(_BEARER) else ""


def new_token(caller: Caller, last_day: date | None, random_bytes: Callable[[int], bytes]) -> tuple[str, TokenEntry]:
    """Make a token; return its text, which is to be shown once, and what the server is to keep."""
    if not TENANT_NAME.fullmatch(caller.tenant):
        raise ConfigError(f"a tenant is named by up to 64 of a-z, 0-9, '.', '_' and '-', found {caller.tenant!r}")
    token_id = random_bytes(8).hex()
    token = f"uc1_{token_id}_{random_bytes(32).hex()}"
    return token, TokenEntry(token_id, sha256(token.encode()).digest(), caller, last_day)


def read_tokens(path: Path) -> dict[str, TokenEntry]:
    """Read a file of tokens, by ID."""
    return _entries(read_kept(path, _FORBIDDEN).decode("utf-8", "replace"), path)


def token_changes(before: Mapping[str, TokenEntry], after: Mapping[str, TokenEntry]) -> list[tuple[str, str]]:
    """Return the tokens added and removed between two readings of a file."""
    changes = (
        ("token_revoked", [entry for token_id, entry in before.items() if token_id not in after]),
        ("token_added", [entry for token_id, entry in after.items() if token_id not in before]),
        ("token_changed", [after[each] for each in before.keys() & after.keys() if before[each] != after[each]]),
    )
    return [
        (kind, f"{entry.token_id} of {entry.caller.tenant}, {entry.caller.role.value}")
        for kind, entries in changes
        for entry in entries
    ]


def add_token(path: Path, entry: TokenEntry) -> None:
    """Add a token to a file of tokens, made with mode 0600 if absent."""
    with _locked(path, os.O_CREAT) as text:
        _entries(text, path)
        ended = text if text.endswith("\n") or not text else f"{text}\n"
        _replace(path, f"{ended}{entry}\n")


def remove_token(path: Path, token_id: str) -> None:
    """Remove a token from a file, which is replaced whole and keeps owner and mode."""
    with _locked(path) as text:
        lines = text.splitlines(keepends=True)
        kept = [line for line in lines if line.split()[:1] != [token_id]]
        if len(kept) == len(lines):
            raise ConfigError(f"{path} must hold the token {token_id!r}, found none of that ID")
        _replace(path, "".join(kept))


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[str]:
    """Yield the content of a file that nobody else changes inside the with block."""
    for _ in range(_LOCK_ATTEMPTS_MAX):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
        with os.fdopen(fd, encoding="utf-8", errors="surrogateescape") as file:
            mode = os.fstat(fd).st_mode
            check_kept(path, mode, _FORBIDDEN)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
                continue
            # The last holder of the lock may have put another file in the place of this one.
            if os.path.samestat(os.fstat(fd), path.lstat()):
                yield file.read()
                return
    raise ConfigError(f"{path} must be free within {_LOCK_PAUSE_S * _LOCK_ATTEMPTS_MAX:g} s, found it locked")


def _replace(path: Path, text: str) -> None:
    try:
        replace_whole(path, text.encode("utf-8", "surrogateescape"))
    except PermissionError as error:
        raise ConfigError(f"{path} must be changed by the user it belongs to, or by root: {error.strerror}") from error


def _entries(text: str, path: Path) -> dict[str, TokenEntry]:
    """Return the tokens in the content of a file, by ID."""
    entries = [
        _entry(line, f"{path}:{number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    return {entry.token_id: entry for entry in entries}


def _entry(line: str, place: str) -> TokenEntry:
    fields = line.split()
    roles = {role.value: role for role in Role}
    if len(fields) != 5 or not _DIGEST.fullmatch(fields[1]) or fields[3] not in roles:
        raise ConfigError(f"{place} must be ID SHA256 TENANT ROLE EXPIRES, with a role of {', '.join(roles)}")
    token_id, digest, tenant, role, expires = fields
    if not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(f"{place} must name a tenant by up to 64 of a-z, 0-9, '.', '_' and '-'")
    try:
        last_day = None if expires == _NEVER else date.fromisoformat(expires)
    except ValueError as error:
        raise ConfigError(f"{place} must end with a date as in 2026-11-21 or never, found {expires!r}") from error
    return TokenEntry(token_id, bytes.fromhex(digest), Caller(tenant, roles[role], f"token {token_id}"), last_day)
