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
import numpy as np
from google.protobuf.message import Message

from unified_cache.core.errors import InputError
from unified_cache.core.page import Namespace, PageKey, Prompt
from unified_cache.core.seal import Label
from unified_cache.core.settings.limits import LimitSettings
from unified_cache.core.window import SPAN_UNKNOWN
from unified_cache.proto import service_pb2
from unified_cache.proto.wire.calls import Parsed, parsed
from unified_cache.proto.wire.names import check_digests, labels_in, labels_of
from unified_cache.service.access.callers import Refused
from unified_cache.service.access.registry import Registration, Registry
from unified_cache.service.access.tokens import TENANT_NAME
from unified_cache.service.requests.assembler import AnnouncedPage
from unified_cache.service.requests.lookup import PoolSpan
from unified_cache.storage_backends.common.names import check_label

__all__ = [
    "NamedRun",
    "all_stored",
    "announced",
    "check_asserted",
    "check_sender",
    "checked_cursor",
    "checked_request",
    "named",
    "prefix",
]

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
    limits: LimitSettings,
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


def prefix(
    request: service_pb2.LookupRequest, registration: Registration, limits: LimitSettings
) -> tuple[Sequence[PageKey], list[PoolSpan]]:
    """Return the keys that a lookup asks about, root first, and the pools that must be there."""
    pools = _pools_of(request, registration)
    if request.WhichOneof("prefix") == "tokens":
        registration.layout.check_page_sizes({pool.name for pool in pools})
        pages_count = len(request.tokens.ids) // registration.layout.page_size
        _check_pages(pages_count, pools, limits)
        return _keys_of(request.tokens, registration, limits), pools
    if len(request.keys.keys) > limits.pages_max:
        raise InputError(f"a lookup names at most {limits.pages_max} pages, found {len(request.keys.keys)}")
    _check_pages(len(request.keys.keys), pools, limits)
    keys = list(request.keys.keys)
    check_digests(keys, "a key")
    return keys, pools


def _pools_of(request: service_pb2.LookupRequest, registration: Registration) -> list[PoolSpan]:
    spans = {
        pool.name: component.span
        for component in registration.layout.components
        for pool in component.pools
        if pool.page_bytes
    }
    if not request.pools:
        return [_known(PoolSpan(name, span)) for name, span in spans.items()]
    names = {pool.name for pool in request.pools}
    unknown = names - spans.keys()
    if unknown:
        raise InputError(f"a pool is one of {', '.join(spans)}, found {min(unknown)!r}")
    if len(names) < len(request.pools):
        raise InputError(f"a lookup names each pool once, found {len(names)} pools named {len(request.pools)} times")
    return [_known(PoolSpan(pool.name, pool.span or spans[pool.name])) for pool in request.pools]


def _known(pool: PoolSpan) -> PoolSpan:
    if pool.span == SPAN_UNKNOWN:
        raise InputError(f"the span of pool {pool.name} is not in its manifest, and must be given")
    return pool


def _check_pages(pages_count: int, pools: Sequence[PoolSpan], limits: LimitSettings) -> None:
    if pages_count * len(pools) > limits.lookup_pages_max:
        raise InputError(
            f"a lookup asks for at most {limits.lookup_pages_max} pages of all its pools, "
            f"found {pages_count} of {len(pools)} pools each"
        )


def checked_cursor(cursor: str) -> str:
    """Return where a scan goes on."""
    if len(cursor) > CURSOR_CHARS_MAX or not _CURSOR.fullmatch(cursor):
        raise InputError("a cursor is what the last scan returned")
    return cursor


def _keys_of(tokens: service_pb2.Tokens, registration: Registration, limits: LimitSettings) -> Sequence[PageKey]:
    if len(tokens.ids) > limits.tokens_max:
        raise InputError(f"a lookup has at most {limits.tokens_max} tokens, found {len(tokens.ids)}")
    ids = np.array(tokens.ids, np.int64)
    if registration.vocabulary and ids.size and ids.max() >= registration.vocabulary:
        raise InputError(f"a token id is less than {registration.vocabulary}, found {ids.max()}")
    said = tokens.namespace
    fields = [
        value if said.HasField(name) else None
        for name, value in (
            ("extra_key", said.extra_key),
            ("cache_salt", said.cache_salt),
            ("lora_id", said.lora_id),
            ("tenant", said.tenant),
        )
    ]
    namespace = Namespace(*fields, bigrams=said.bigrams)
    return Prompt.of(ids, registration.layout.page_size, namespace).keys


def all_stored(runs: Iterable[NamedRun]) -> list[Label]:
    """Return the pages of all runs as the store calls them."""
    return list(chain.from_iterable(run.stored for run in runs))
