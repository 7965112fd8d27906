"""Output of ``unified-cache storage``: identities and the flaws of their objects, as tables and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TextIO

from unified_cache.byte_sizes import size_text
from unified_cache.cli.text import LineConsole, console_on
from unified_cache.offline.listing import FlawedObject, ObjectCount, ReadOutcome, total_of
from unified_cache.offline.stores import StoredIdentity, Undescribed
from unified_cache.offline.upkeep import Garbage, Verification
from unified_cache.pool import Component, ModelLayout
from unified_cache.storage_backends.catalog import UsedBetween
from unified_cache.window import SPAN_ALL, SPAN_UNTOLD

__all__ = [
    "finding_as_json",
    "gc_as_json",
    "print_findings",
    "print_gc",
    "print_results",
    "print_stat",
    "result_as_json",
    "stat_as_json",
]

FINDINGS_SHOWN_MAX = 20
"""Flawed objects named below a table; --json names all."""


def print_results(stream: TextIO, found: Sequence[StoredIdentity], results: Sequence[Verification]) -> None:
    """Print the result of reading every identity, then name the flawed objects."""
    rows: list[tuple[str, ...]] = []
    for kept, result in zip(found, results, strict=True):
        counts = (
            result.sound_count,
            result.count(ReadOutcome.FLAWED),
            result.count(ReadOutcome.UNREADABLE),
            result.gone_count,
            result.removed_count,
        )
        size = size_text(result.read.object_bytes)
        objects = f"{result.read.objects_count:,}"
        rows.append((kept.short_name, kept.name, objects, size, *map("{:,}".format, counts)))
    console = console_on(stream)
    columns = ("identity", "model", "objects", "bytes", "sound", "flawed", "unreadable", "gone", "removed")
    console.print_table(columns, rows, left=2)
    print_findings(console, [finding for result in results for finding in result.findings])
    for kept in found:
        if isinstance(kept.description, Undescribed):
            console.print_line(kept.description.reason)


def finding_as_json(finding: FlawedObject) -> dict[str, str]:
    """Return the flaw of an object as values that JSON has."""
    return {"object": finding.label.object_name, "outcome": finding.outcome.value, "reason": finding.reason}


def print_findings(console: LineConsole, findings: Sequence[FlawedObject]) -> None:
    """Print the first few flawed objects with their reasons."""
    for finding in findings[:FINDINGS_SHOWN_MAX]:
        console.print_line(f"{finding.outcome.value}: {finding.label.object_name}: {finding.reason}")
    if len(findings) > FINDINGS_SHOWN_MAX:
        console.print_line(f"and {len(findings) - FINDINGS_SHOWN_MAX:,} more; --json names all")


def result_as_json(kept: StoredIdentity, result: Verification) -> dict[str, object]:
    """Return the result of one identity with all its findings, as values that JSON has."""
    return {
        "identity": kept.digest.hex(),
        "manifest": kept.description.reason if isinstance(kept.description, Undescribed) else "sound",
        "objects": result.read.objects_count,
        "bytes": result.read.object_bytes,
        "sound": result.sound_count,
        "gone": result.gone_count,
        "removed": result.removed_count,
        "findings": [finding_as_json(finding) for finding in result.findings],
    }


def print_gc(
    stream: TextIO, collected: Sequence[tuple[StoredIdentity, Garbage | None]], evicted: ObjectCount | None
) -> None:
    """Print what was removed of each identity, and what a cap evicted, if there was one."""
    console = console_on(stream)
    for kept, garbage in collected:
        if garbage is not None:
            console.print_line(
                f"{kept.short_name}: removed {len(garbage.misfits):,} objects that fit no pool and "
                f"{len(garbage.incomplete):,} of incomplete pages, {size_text(garbage.bytes_count)}"
            )
        elif isinstance(kept.description, Undescribed):
            console.print_line(f"{kept.short_name}: left alone, {kept.description.reason}")
    if evicted is not None:
        console.print_line(f"evicted {evicted.objects_count:,} objects, {size_text(evicted.object_bytes)}")


def gc_as_json(
    url: str, collected: Sequence[tuple[StoredIdentity, Garbage | None]], evicted: ObjectCount, left: ObjectCount
) -> dict[str, object]:
    """Return what a collection removed and left, as values that JSON has; None for an identity left alone."""
    return {
        "store": url,
        "identities": [
            {
                "identity": kept.digest.hex(),
                "misfit_objects": None if garbage is None else len(garbage.misfits),
                "incomplete_objects": None if garbage is None else len(garbage.incomplete),
                "removed_bytes": None if garbage is None else garbage.bytes_count,
            }
            for kept, garbage in collected
        ],
        "evicted_objects": evicted.objects_count,
        "evicted_bytes": evicted.object_bytes,
        "objects": left.objects_count,
        "bytes": left.object_bytes,
    }


def stat_as_json(
    kept: StoredIdentity, counts: Mapping[str, ObjectCount], used: UsedBetween | None
) -> dict[str, object]:
    """Return the contents of one identity, as ``print_stat`` prints them, as values that JSON has."""
    total = total_of([counts])
    about: dict[str, object]
    if isinstance(kept.description, Undescribed):
        about = {"manifest": kept.description.reason}
    else:
        identity, layout = kept.description.identity, kept.description.layout
        about = {
            "manifest": "sound",
            "model": identity.model,
            "revision": identity.revision,
            "dtype": identity.dtype,
            "shard": identity.shard.text,
            "generation": identity.generation,
            "facts": dict(identity.facts),
            "page_size": layout.page_size,
            "components": [
                {
                    "name": component.name,
                    "hit_policy": None if (policy := component.hit_policy) is None else policy.value,
                    "span_pages": None if component.span in (SPAN_ALL, SPAN_UNTOLD) else component.span,
                    "page_size": layout.page_size_of(component),
                    "pools": [{"name": pool.name, "page_bytes": pool.page_bytes} for pool in component.pools],
                }
                for component in layout.components
            ],
        }
    return {
        "identity": kept.digest.hex(),
        **about,
        "objects": total.objects_count,
        "bytes": total.object_bytes,
        "pools": {
            name: {"objects": count.objects_count, "bytes": count.object_bytes} for name, count in counts.items()
        },
        "used": None if used is None else {"oldest": _time_text(used.oldest_ns), "newest": _time_text(used.newest_ns)},
    }


def print_stat(
    stream: TextIO, kept: StoredIdentity, counts: Mapping[str, ObjectCount], used: UsedBetween | None
) -> None:
    """Print one identity and its pools."""
    console = console_on(stream)
    rows: list[tuple[str, ...]] = []
    rest = dict(counts)
    facts: list[str] = []
    title = f"{kept.short_name}  {kept.name}"
    if isinstance(kept.description, Undescribed):
        title = kept.description.reason
    else:
        identity, layout = kept.description.identity, kept.description.layout
        named = [("revision", identity.revision), ("dtype", identity.dtype), ("shard", identity.shard.text)]
        named.append(("generation", str(identity.generation or "")))
        title += (
            "".join(f"  {name} {value}" for name, value in named if value) + f"  pages of {layout.page_size} tokens"
        )
        facts = [f"{name} {value}" for name, value in identity.facts]
        for name, component, needs, page_bytes in _pool_rows(layout):
            count = rest.pop(name, ObjectCount())
            rows.append((name, component, needs, f"{page_bytes:,}", *_count_cells(count)))
    if used is not None:
        title += f"  used {_time_text(used.oldest_ns)} to {_time_text(used.newest_ns)}"
    for name, count in rest.items():
        rows.append((name, "none", "", "", *_count_cells(count)))
    console.print_line("")
    console.print_line(title)
    for fact in facts:
        console.print_line(f"  {fact}")
    console.print_table(("pool", "component", "a resume needs", "payload bytes", "objects", "bytes"), rows, left=3)


def _pool_rows(layout: ModelLayout) -> Iterator[tuple[str, str, str, int]]:
    for component in layout.components:
        needs = _needs(component)
        if layout.page_size_of(component) != layout.page_size:
            needs += f", of {component.page_size} tokens"
        for pool in component.pools:
            yield pool.name, component.name, needs if pool.page_bytes else "no objects", pool.page_bytes


def _needs(component: Component) -> str:
    if component.span == SPAN_UNTOLD:
        return "not told"
    return "every page" if component.span == SPAN_ALL else f"the last {component.span:,}"


def _count_cells(count: ObjectCount) -> tuple[str, str]:
    return f"{count.objects_count:,}", size_text(count.object_bytes)


def _time_text(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
