"""Checks of request messages, before anything is done.

One that makes no sense is an ``InputError``; one of another tenant, or of an identity for which nobody said Hello, is
``Refused``.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import grpc
from google.protobuf.message import Message

from unified_cache.core.errors import InputError
from unified_cache.core.seal import Label
from unified_cache.proto import service_pb2
from unified_cache.proto.wire.calls import Parsed, parsed
from unified_cache.proto.wire.names import labels_in, labels_of
from unified_cache.service.access.callers import Refused
from unified_cache.service.access.registry import Registration, Registry
from unified_cache.service.access.tokens import TENANT_NAME
from unified_cache.service.limits import Limits
from unified_cache.service.requests.assembler import AnnouncedPage
from unified_cache.storage_backends.common.names import check_label

CURSOR_CHARS_MAX = 256
"""A scan's cursor is the name of an object, in every store so far."""

_CURSOR = re.compile(r"[\x21-\x7e]*")

_RESERVED = frozenset({"default"})
"""Tenant of every caller on a server without authentication; no other tenant may have this name."""


@dataclass(frozen=True, slots=True)
class NamedRun:
    """Pages of one registered identity and one pool."""

    registration: Registration
    pool: str
    labels: Sequence[Label]
    """As the client calls them."""
    claimed_bytes: int
    """Length of each page as the client has it; 0 where only names matter."""

    @property
    def object_bytes(self) -> int:
        """Length of each page by its layout."""
        return self.registration.object_bytes[self.pool]

    @property
    def stored(self) -> list[Label]:
        """The same pages as the store calls them."""
        return labels_of(self.registration.stored.identity, (key for _, key, _ in self.labels), self.pool)


def check_asserted(asserted: str, tenant: str) -> None:
    """Check whom a request thinks it comes from."""
    if not TENANT_NAME.fullmatch(asserted) or (asserted in _RESERVED and asserted != tenant):
        raise InputError("a tenant is called by at most 64 of a-z, 0-9, dot, dash and underscore")
    if asserted != tenant:
        raise Refused(grpc.StatusCode.PERMISSION_DENIED, "the caller belongs to another tenant")


def check_sender(request: Message, tenant: str) -> None:
    """Check whom a request, or the start of one, thinks it comes from."""
    if request.HasField("tenant"):
        # Every request of the contract has this field.
        check_asserted(cast("service_pb2.StatsRequest", request).tenant, tenant)


def checked_request(kind: type[Parsed], message: bytes, tenant: str) -> Parsed:
    """Read a request, and check whom it thinks it comes from."""
    request = parsed(kind, message)
    check_sender(request, tenant)
    return request


def named(
    runs: Iterable[service_pb2.PageRun],
    tenant: str,
    registry: Registry,
    limits: Limits,
    *,
    any_pool: bool = False,
) -> list[NamedRun]:
    """Resolve runs of pages, with ``any_pool`` also of pools that no layout has."""
    found: list[NamedRun] = []
    pages_count = 0
    for run in runs:
        pages_count += len(run.keys)
        if not run.keys or pages_count > limits.pages_max:
            raise InputError(f"a request names 1 to {limits.pages_max} pages, and a run at least one")
        labels = labels_in(run)
        registration = registry.find(tenant, run.identity)
        if any_pool:
            check_label(labels[0])
        elif run.pool not in registration.object_bytes:
            raise InputError(f"a pool is one of {', '.join(registration.object_bytes)}, found {run.pool!r}")
        found.append(NamedRun(registration, run.pool, labels, run.object_bytes))
    return found


def announced(runs: Sequence[NamedRun]) -> list[AnnouncedPage]:
    """Return the pages that a put announces, one by one."""
    pages: list[AnnouncedPage] = []
    for run in runs:
        if run.claimed_bytes != run.object_bytes:
            raise InputError(f"a page of pool {run.pool} has {run.object_bytes} bytes, found {run.claimed_bytes}")
        pages += [
            AnnouncedPage(label, stored, run.object_bytes) for label, stored in zip(run.labels, run.stored, strict=True)
        ]
    return pages


def checked_cursor(cursor: str) -> str:
    """Return where a scan goes on."""
    if len(cursor) > CURSOR_CHARS_MAX or not _CURSOR.fullmatch(cursor):
        raise InputError("a cursor is what the last scan returned")
    return cursor


def all_stored(runs: Iterable[NamedRun]) -> list[Label]:
    """Return the pages of all runs as the store calls them."""
    return list(chain.from_iterable(run.stored for run in runs))
