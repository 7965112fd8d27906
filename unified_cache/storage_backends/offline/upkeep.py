"""Upkeep of a store: verify and scrub read everything, gc reads nothing, clear removes everything.

All of them work on a store that engines use at the same time. A removed object is a miss from then on.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from unified_cache.core.errors import StorageError, StorageTimeoutError
from unified_cache.core.pool import ModelLayout
from unified_cache.core.seal import Label
from unified_cache.storage_backends.manifest import Description
from unified_cache.storage_backends.offline.listing import (
    Findings,
    ObjectCount,
    ObjectPools,
    ReadObject,
    Watch,
    batches,
    empty_page,
    listed,
    pages_of,
    read_verified,
    unwatched,
)
from unified_cache.storage_backends.offline.stores import StoredIdentity, Undescribed
from unified_cache.storage_backends.protocol import NAMES_MAX, Answer, PageIO, Store

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Verification:
    """Result of reading every object of one identity."""

    read: ObjectCount = field(default_factory=ObjectCount)
    sound_count: int = 0
    gone_count: int = 0
    findings: Findings = field(default_factory=Findings)
    """In the order of the listing."""
    removed_count: int = 0
    last_name: str = ""
    """Name of the last object, behind which another call may go on."""


def verify(
    storage: Store, kept: StoredIdentity, watch: Watch, result: Verification, *, after: str = "", is_scrub: bool = False
) -> None:
    """Read and verify every object of an identity; with ``is_scrub`` remove flawed ones, batch by batch.

    An object is flawed where its seal names another page, its checksum does not hold, or its pool or length are not
    those of the layout. Of an identity without a manifest the seals alone are verified. Objects up to the name in
    ``after`` are passed over.
    """
    for readings in _examined(storage, kept, after):
        flawed = [reading.page.label for reading in readings if reading.outcome is Answer.FLAWED]
        if is_scrub and flawed:
            result.removed_count += storage.remove(flawed)
        _record(result, readings, watch)


@dataclass(slots=True)
class Garbage:
    """Objects of a store that no engine could use, and that were removed."""

    misfits_count: int = 0
    """Objects of a pool or a length that the layout does not have."""
    incomplete_count: int = 0
    """Objects of pages that lack another object: a sidecar without its anchor, any page without Full's."""
    bytes_count: int = 0
    """What they took of the store's cap."""


def collect(storage: Store, identity: bytes, layout: ModelLayout, watch: Watch = unwatched) -> Garbage:
    """Remove the objects that no engine can use, as they are listed. One scan, no reads.

    A listing has pools, lengths and which objects a page has. It does not have a page's parent, so that pages whose
    chain is broken before them stay; the store's own recency lets them go. An engine that is storing a page right now
    may lose what it has stored of it: a miss.
    """
    pools = ObjectPools(identity, layout)
    taken_bytes = storage.capability().taken_bytes
    garbage = Garbage()
    labels: list[Label] = []
    for page in pages_of(storage, identity, pools, watch):
        useless = pools.useless(page.present)
        bits = [bit for bit in range(len(pools.specs)) if useless >> bit & 1]
        garbage.misfits_count += len(page.misfits)
        garbage.incomplete_count += len(bits)
        labels += [found.label for found in page.misfits] + [pools.label(page.key, bit) for bit in bits]
        garbage.bytes_count += sum(taken_bytes(found.object_bytes) for found in page.misfits)
        garbage.bytes_count += sum(taken_bytes(pools.object_bytes(bit)) for bit in bits)
        if len(labels) >= NAMES_MAX:
            _remove(storage, labels)
            labels = []
    _remove(storage, labels)
    return garbage


def shrink(storage: Store, found: Sequence[StoredIdentity], bytes_max: int) -> None:
    """Remove whole pages until these identities have at most ``bytes_max`` bytes, headers included.

    For a store that does not say when a page was used. Identities of which there is a later generation go first; then
    pages in the order of the first two bytes of their keys, of all prompts alike. Two scans each, no reads.
    """
    last = set(_last_generations(found))
    parts: Counter[tuple[bool, bytes]] = Counter()
    for kept in found:
        for objects in listed(storage, kept.digest):
            for each in objects:
                parts[kept.digest in last, each.label.key[:2]] += each.object_bytes
    left_bytes = parts.total()
    going: set[tuple[bool, bytes]] = set()
    for part in sorted(parts):
        if left_bytes <= bytes_max:
            break
        going.add(part)
        left_bytes -= parts[part]
    for kept in found:
        for objects in listed(storage, kept.digest):
            labels = [each.label for each in objects if (kept.digest in last, each.label.key[:2]) in going]
            _remove(storage, labels)


def _last_generations(found: Sequence[StoredIdentity]) -> Iterator[bytes]:
    """Yield the digests of the identities without a later generation; what has no manifest is one of them."""
    newest: dict[Description, tuple[int, bytes]] = {}
    for kept in found:
        if isinstance(kept.description, Undescribed):
            yield kept.digest
            continue
        identity = kept.description.identity
        same = replace(kept.description, identity=replace(identity, generation=0))
        newest[same] = max(newest.get(same, (-1, b"")), (identity.generation, kept.digest))
    for _, digest in newest.values():
        yield digest


def clear(storage: Store, identity: bytes, watch: Watch) -> int:
    """Remove every object of an identity, not its manifest; return how many. If that fails, another call goes on.

    What is listed goes a part at a time, so that no call takes long; then the store clears what it does not list, and
    what it would not remove: a service whose places are all taken has one for its administrator's clear.
    """
    removed_count = 0
    try:
        for objects in listed(storage, identity):
            part_count = _remove(storage, [found.label for found in objects])
            removed_count += part_count
            watch(part_count, 0)
    except StorageTimeoutError:
        raise
    except StorageError as error:
        logger.debug("pages could not be removed one by one: %s", error)
    return removed_count + storage.clear(identity)


def _remove(storage: Store, labels: list[Label]) -> int:
    return sum(storage.remove(labels[start : start + NAMES_MAX]) for start in range(0, len(labels), NAMES_MAX))


def _examined(storage: Store, kept: StoredIdentity, after: str) -> Iterator[list[ReadObject]]:
    """Read every object of an identity, a batch at a time; objects of a wrong pool or length are flawed unread."""
    pools = None if isinstance(kept.description, Undescribed) else ObjectPools(kept.digest, kept.description.layout)
    for batch in batches(found for objects in listed(storage, kept.digest, after) for found in objects):
        readings: list[ReadObject] = []
        fitting: list[PageIO] = []
        for found in batch:
            reason = None if pools is None else pools.misfit(found)
            if reason is None:
                fitting.append(empty_page(found))
            else:
                unread = PageIO(found.label, ())
                readings.append(ReadObject(unread, found.object_bytes, Answer.FLAWED, reason))
        yield readings + (read_verified(storage, fitting) if fitting else [])


def _record(result: Verification, readings: Sequence[ReadObject], watch: Watch) -> None:
    for reading in readings:
        result.read.add(reading.object_bytes)
        if reading.outcome is Answer.HIT:
            result.sound_count += 1
        elif reading.outcome is Answer.MISS:
            result.gone_count += 1
        else:
            result.findings.add(reading.page.label, reading.outcome, reading.reason)
    # Of a batch those that were not read come first.
    result.last_name = max([result.last_name, *(reading.page.label.page_name for reading in readings)])
    watch(len(readings), sum(reading.object_bytes for reading in readings))
