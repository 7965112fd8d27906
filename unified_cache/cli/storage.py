"""``unified-cache storage``: list, verify, scrub, collect and clear the objects of a store.

Every command works on a store that engines are using; what removes objects from a packed one needs it closed. What a
command removes is a miss from then on.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, TextIO

import typer

from unified_cache.cli.options import IdentityOption, JsonOptions, StoreArgument
from unified_cache.cli.progress import objects_watched
from unified_cache.cli.text import LineConsole, console_on, example
from unified_cache.cli.tool_calls import SHRINK_S, open_in_time
from unified_cache.core.errors import CacheError, ConfigError, without_secrets
from unified_cache.core.pool import Component, ModelLayout
from unified_cache.core.sizes import parse_bytes, size_text
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.storage_backends.common.names import parse_page_name
from unified_cache.storage_backends.offline.listing import (
    Findings,
    ObjectCount,
    Watch,
    count_objects,
    pools_of,
    total_of,
)
from unified_cache.storage_backends.offline.stores import (
    StoredIdentity,
    Undescribed,
    has_cap_of_its_own,
    identities_of,
    open_existing,
    open_to_read,
    selected,
)
from unified_cache.storage_backends.offline.upkeep import (
    Garbage,
    Verification,
    clear,
    collect,
    shrink,
    verify,
)
from unified_cache.storage_backends.protocol import Answer, Contents, Store

STORAGE_EPILOG = """**Examples**

    unified-cache storage stat file:kv-store

    unified-cache storage verify file:kv-store --json

    unified-cache storage gc file:kv-store --bytes-max 400GiB

    unified-cache storage clear file:kv-store --identity 3f2a --yes
"""

storage_app = typer.Typer(
    name="storage",
    epilog=STORAGE_EPILOG,
    help="Look at a store, verify it, and keep it in order, without an engine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

FINDINGS_SHOWN_MAX = 20
"""Flawed objects named below a table; --json names ``FINDINGS_MAX`` of each identity."""


@dataclass(frozen=True)
class _StoreOptions(JsonOptions):
    """Options of a command about a store, or about one identity of it."""

    url: StoreArgument
    identity: IdentityOption = None


@dataclass(frozen=True)
class _ReadingOptions(_StoreOptions):
    """Options of a command that reads every object."""

    after: Annotated[
        str | None, typer.Option(metavar="OBJECT", help="Go on after this object, which an interrupted run names.")
    ] = None

    @property
    def start(self) -> tuple[bytes, str]:
        """Return identity and name of the object to go on after; empty ones to begin at the beginning."""
        if self.after is None:
            return b"", ""
        digits, _, name = self.after.partition("/")
        try:
            identity = bytes.fromhex(digits)
        except ValueError:
            identity = b""
        if parse_page_name(identity, name) is None:
            raise ConfigError(f"--after must be an object's name as in IDENTITY/KEY.POOL, found {self.after!r}")
        return identity, name


@dataclass(frozen=True, slots=True)
class StatCommand(_StoreOptions):
    """Show what a store holds: identities, their pools, objects and bytes. Reads no page."""

    def run(self) -> None:
        """List and show."""
        with closing(open_in_time(open_to_read, self.url)) as storage:
            capability = storage.capability()
            found = selected(storage, self.url, self.identity)
            with objects_watched(sys.stderr, "stat", None) as watch:
                counts = [count_objects(storage, kept.digest, watch) for kept in found]
            foreign = storage.foreign_paths()
        total = total_of(counts)
        apart = [differences(kept, found[:number]) for number, kept in enumerate(found)]
        value = {
            "store": without_secrets(self.url),
            "kind": capability.name,
            "durable": capability.durable,
            "bytes_max": capability.bytes_max,
            "objects": total.objects_count,
            "bytes": total.object_bytes,
            "identities": [stat_as_json(*each) for each in zip(found, counts, apart, strict=True)],
        }
        if not self.shown_as_json("storage stat", value):
            console = console_on(sys.stdout)
            durable = "durable" if capability.durable else "not durable"
            cap = "no cap" if capability.bytes_max is None else f"at most {size_text(capability.bytes_max)}"
            console.print_line(
                f"{without_secrets(self.url)}: {capability.name}, {durable}, {cap}; "
                f"{total.objects_count:,} objects, {size_text(total.object_bytes)}",
                style="bold",
            )
            for each in zip(found, counts, apart, strict=True):
                print_stat(sys.stdout, *each)
        check_places(self.url, foreign)


@dataclass(frozen=True, slots=True)
class VerifyCommand(_ReadingOptions):
    """Read every object of a store, verify it against its seal, and report the flawed ones; change nothing."""

    def run(self) -> None:
        """Read everything and show what is wrong."""
        found, findings = _examined(open_to_read, "verify", self)
        flawed, unavailable = findings[Answer.FLAWED], findings[Answer.UNAVAILABLE]
        if flawed or unavailable:
            raise CacheError(
                f"every object of {without_secrets(self.url)} must be sound, "
                f"found {flawed} flawed and {unavailable} unavailable; unified-cache storage scrub removes the flawed"
            )
        for kept in found:
            kept.described()


@dataclass(frozen=True, slots=True)
class ScrubCommand(_ReadingOptions):
    """Verify every object of a store and remove the flawed ones, so that an engine can store those pages again.

    Objects that cannot be read stay: the fault may be the disk's. A damaged manifest is named, and written again by the
    engine whose pages it describes.
    """

    def run(self) -> None:
        """Read everything, remove what is flawed, show both."""
        found, findings = _examined(open_existing, "scrub", self)
        if findings[Answer.UNAVAILABLE]:
            raise CacheError(
                f"every object of {without_secrets(self.url)} must be readable, "
                f"found {findings[Answer.UNAVAILABLE]} that are not; see above"
            )
        for kept in found:
            kept.described()


@dataclass(frozen=True, slots=True)
class GcCommand(_StoreOptions):
    """Remove objects that no engine can use, and with --bytes-max those that exceed a cap. Reads no page.

    No engine can use: objects of a pool or length that their layout does not have, sidecars without their anchor, and
    pages without Full's. A listing does not have a page's parent, so pages whose chain is broken before them stay until
    the cap evicts them, the least recently used first. Opening a file store always sweeps the temp files of dead
    processes.

    Mooncake and services do not report when a page was used. There --bytes-max removes earlier generations first, then
    pages in no order of use; of a service, your own pages alone.
    """

    bytes_max: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Shrink the store to that, as in 500MB or 4GiB.")
    ] = None

    def run(self) -> None:
        """Remove and show."""
        cap = None if self.bytes_max is None else parse_bytes("--bytes-max", self.bytes_max)
        with closing(open_in_time(open_existing, self.url)) as storage:
            found = selected(storage, self.url, self.identity)
            capped = replace(storage.capability(), bytes_max=cap)
            for kept in found:
                if not isinstance(kept.description, Undescribed):
                    capped.check_cap(kept.description.layout)  # a cap below a page would remove everything
            total = _counted(storage, found)
            with objects_watched(sys.stderr, "gc", total.objects_count) as watch:
                collected = [(kept, _collected(storage, kept, watch)) for kept in found]
            before = _everything(storage)
            if cap is not None and has_cap_of_its_own(self.url):
                shrink(storage, identities_of(storage), cap)
        if cap is not None and not has_cap_of_its_own(self.url):
            open_in_time(lambda url: open_existing(url, cap), self.url, SHRINK_S).close()
        after = before
        if cap is not None:
            with closing(open_in_time(open_to_read, self.url)) as opened:
                after = _everything(opened)
        evicted = ObjectCount(before.objects_count - after.objects_count, before.object_bytes - after.object_bytes)
        value = gc_as_json(self.url, collected, evicted, after)
        if not self.shown_as_json("storage gc", value):
            print_gc(collected, None if cap is None else evicted)
        if cap is not None and after.object_bytes > cap:
            raise CacheError(f"{without_secrets(self.url)} must shrink to {cap} bytes, found {after.object_bytes}")


def _collected(storage: Store, kept: StoredIdentity, watch: Watch) -> Garbage | None:
    """Remove the garbage of one identity and return it; None where it is unknown."""
    if isinstance(kept.description, Undescribed):
        return None
    return collect(storage, kept.digest, kept.description.layout, watch)


@dataclass(frozen=True, slots=True)
class ClearCommand(_StoreOptions):
    """Remove every object of one identity, or of all. Manifests stay. Without --yes nothing is removed."""

    everything: Annotated[bool, typer.Option("--all", help="Every identity of the store.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False

    def run(self) -> None:
        """Remove and show."""
        if self.everything == (self.identity is not None):
            raise ConfigError(
                "clear needs either --identity DIGEST or --all; unified-cache storage stat lists identities"
            )
        with closing(open_in_time(open_existing, self.url)) as storage:
            found = selected(storage, self.url, self.identity)
            total = _counted(storage, found)
            going = f"{total.objects_count:,} objects, {size_text(total.object_bytes)}, of {len(found)} identities"
            if not self.yes:
                raise ConfigError(f"clear would remove {going} from {without_secrets(self.url)}; say so with --yes")
            removed_count = 0
            with objects_watched(sys.stderr, "clear", total.objects_count) as watch:
                for kept in found:
                    removed_count += clear(storage, kept.digest, watch)
        value = {
            "store": without_secrets(self.url),
            "identities": len(found),
            "found_objects": total.objects_count,
            "found_bytes": total.object_bytes,
            "removed_objects": removed_count,
        }
        if self.shown_as_json("storage clear", value):
            return
        console_on(sys.stdout).print_line(f"removed {removed_count:,} of {going}")


def _examined(
    open_store: Callable[[str], Store], verb: str, asked: _ReadingOptions
) -> tuple[list[StoredIdentity], Counter[Answer]]:
    """Verify or scrub every identity that was asked for, print the results, and count what was found."""
    first, after = asked.start

    def show() -> None:
        identities = [result_as_json(*each) for each in zip(found, results, strict=True)]
        if not asked.shown_as_json(f"storage {verb}", {"store": without_secrets(asked.url), "identities": identities}):
            print_results(found, results)

    with closing(open_in_time(open_store, asked.url)) as storage:
        found = [kept for kept in selected(storage, asked.url, asked.identity) if kept.digest >= first]
        total = _counted(storage, found)
        results = [Verification() for _ in found]
        try:
            with objects_watched(sys.stderr, verb, None if after else total.objects_count) as watch:
                for kept, result in zip(found, results, strict=True):
                    start = after if kept.digest == first else ""
                    verify(storage, kept, watch, result, after=start, is_scrub=verb == "scrub")
        except KeyboardInterrupt as interrupted:
            if not asked.as_json:
                show()
            read = [(kept, result) for kept, result in zip(found, results, strict=True) if result.last_name]
            if read:
                kept, result = read[-1]
                # Another run, which goes on behind them, finds nothing of these.
                flawed = sum(each.findings.counts.total() for each in results)
                interrupted.args += (
                    f"{flawed:,} of them flawed or unavailable",
                    f"go on with --after {kept.digest.hex()}/{result.last_name}",
                )
            raise
        foreign = storage.foreign_paths()
    show()
    check_places(asked.url, foreign)
    return found, sum((result.findings.counts for result in results), Counter[Answer]())


def check_places(url: str, foreign: Sequence[str]) -> None:
    """Raise CacheError, which names them, for what stands in the place of a store's own directories."""
    if foreign:
        raise CacheError(
            f"each directory of pages of {without_secrets(url)} must be one of its own, "
            f"found a link or a file at {', '.join(foreign)}; remove it, pages that belong there are declined"
        )


def _everything(storage: Store) -> ObjectCount:
    return _counted(storage, identities_of(storage))


def _counted(storage: Store, found: Sequence[StoredIdentity]) -> ObjectCount:
    """Count all objects of some identities, with what each takes of a cap, and show how far it is."""
    with objects_watched(sys.stderr, "count", None) as watch:
        contents = [count_objects(storage, kept.digest, watch) for kept in found]
    return total_of(contents, storage.capability().taken_bytes)


def print_results(found: Sequence[StoredIdentity], results: Sequence[Verification]) -> None:
    """Print the result of reading every identity, then name the flawed objects."""
    rows: list[tuple[str, ...]] = []
    for kept, result in zip(found, results, strict=True):
        counts = (
            result.sound_count,
            result.findings.counts[Answer.FLAWED],
            result.findings.counts[Answer.UNAVAILABLE],
            result.gone_count,
            result.removed_count,
        )
        size = size_text(result.read.object_bytes)
        objects = f"{result.read.objects_count:,}"
        rows.append((kept.short_name, kept.name, objects, size, *map("{:,}".format, counts)))
    console = console_on(sys.stdout)
    columns = ("identity", "model", "objects", "bytes read", "sound", "flawed", "unavailable", "gone", "removed")
    console.print_table(columns, rows, left=2)
    print_findings(console, [result.findings for result in results])
    for kept in found:
        if isinstance(kept.description, Undescribed):
            console.print_line(kept.description.reason)


def findings_as_json(findings: Findings) -> list[dict[str, str]]:
    """Return the flaws of the objects that are named, as values that JSON has."""
    return [
        {"object": finding.label.object_name, "outcome": finding.outcome.value, "reason": finding.reason}
        for finding in findings.named.values()
    ]


def print_findings(console: LineConsole, found: Sequence[Findings]) -> None:
    """Print the first few flawed objects with their reasons."""
    named = [finding for findings in found for finding in findings.named.values()]
    for finding in named[:FINDINGS_SHOWN_MAX]:
        console.print_line(f"{finding.outcome.value}: {finding.label.object_name}: {finding.reason}")
    rest_count = sum(findings.total for findings in found) - FINDINGS_SHOWN_MAX
    if rest_count > 0:
        console.print_line(
            f"and {rest_count:,} more; --json names {min(len(named) - FINDINGS_SHOWN_MAX, rest_count):,} of them"
        )


def result_as_json(kept: StoredIdentity, result: Verification) -> dict[str, object]:
    """Return the result of one identity with all its findings, as values that JSON has."""
    return {
        "identity": kept.digest.hex(),
        "manifest": kept.description.reason if isinstance(kept.description, Undescribed) else "sound",
        "objects": result.read.objects_count,
        "read_bytes": result.read.object_bytes,
        "sound": result.sound_count,
        "gone": result.gone_count,
        "removed": result.removed_count,
        "findings": findings_as_json(result.findings),
    }


def print_gc(collected: Sequence[tuple[StoredIdentity, Garbage | None]], evicted: ObjectCount | None) -> None:
    """Print what was removed of each identity, and what a cap evicted, if there was one."""
    console = console_on(sys.stdout)
    for kept, garbage in collected:
        if garbage is not None:
            console.print_line(
                f"{kept.short_name}: removed {garbage.misfits_count:,} objects that fit no pool and "
                f"{garbage.incomplete_count:,} of incomplete pages, {size_text(garbage.bytes_count)}"
            )
        elif isinstance(kept.description, Undescribed):
            console.print_line(f"{kept.short_name}: skipped, {kept.description.reason}")
    if evicted is not None:
        console.print_line(f"evicted {evicted.objects_count:,} objects, {size_text(evicted.object_bytes)}")


def gc_as_json(
    url: str, collected: Sequence[tuple[StoredIdentity, Garbage | None]], evicted: ObjectCount, left: ObjectCount
) -> dict[str, object]:
    """Return what a collection removed and left, as values that JSON has; None for an identity not looked at."""
    return {
        "store": without_secrets(url),
        "identities": [
            {
                "identity": kept.digest.hex(),
                "misfit_objects": None if garbage is None else garbage.misfits_count,
                "incomplete_objects": None if garbage is None else garbage.incomplete_count,
                "removed_bytes": None if garbage is None else garbage.bytes_count,
            }
            for kept, garbage in collected
        ],
        "evicted_objects": evicted.objects_count,
        "evicted_bytes": evicted.object_bytes,
        "objects": left.objects_count,
        "bytes": left.object_bytes,
    }


@dataclass(frozen=True, slots=True)
class Differences:
    """Names, with values, of all that tells an identity from another one of its store."""

    other: StoredIdentity
    names: tuple[str, ...]


def differences(kept: StoredIdentity, others: Sequence[StoredIdentity]) -> Differences | None:
    """Return what tells an identity from the most similar of some others; None if no manifest says."""
    if isinstance(kept.description, Undescribed):
        return None
    found = [
        Differences(other, kept.description.differences(other.description))
        for other in others
        if not isinstance(other.description, Undescribed)
    ]
    return min(found, key=lambda each: len(each.names), default=None)


def stat_as_json(kept: StoredIdentity, contents: Contents, apart: Differences | None) -> dict[str, object]:
    """Return the contents of one identity, as ``print_stat`` prints them, as values that JSON has."""
    total = total_of([contents])
    used = contents.used
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
                    "hit_policy": component.hit_policy,
                    "span_pages": None if component.span in (SPAN_ALL, SPAN_UNKNOWN) else component.span,
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
            name: {"objects": count.objects_count, "bytes": count.object_bytes}
            for name, count in pools_of(contents).items()
        },
        "used": None if used is None else {"oldest": _time_text(used.oldest_ns), "newest": _time_text(used.newest_ns)},
        "differs": None if apart is None else {"from": apart.other.digest.hex(), "in": apart.names},
    }


def print_stat(stream: TextIO, kept: StoredIdentity, contents: Contents, apart: Differences | None) -> None:
    """Print one identity and its pools."""
    console = console_on(stream)
    rows: list[tuple[str, ...]] = []
    rest = pools_of(contents)
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
    if contents.used is not None:
        title += f"  used {_time_text(contents.used.oldest_ns)} to {_time_text(contents.used.newest_ns)}"
    for name, count in rest.items():
        rows.append((name, "none", "", "", *_count_cells(count)))
    console.print_line("")
    console.print_line(title)
    for fact in facts:
        console.print_line(f"  {fact}")
    if apart is not None:
        console.print_line(f"  differs from {apart.other.short_name} in {', '.join(apart.names)}")
    console.print_table(("pool", "component", "a resume needs", "payload bytes", "objects", "bytes"), rows, left=3)


def _pool_rows(layout: ModelLayout) -> Iterator[tuple[str, str, str, int]]:
    for component in layout.components:
        needs = _needs(component)
        if layout.page_size_of(component) != layout.page_size:
            needs += f", of {component.page_size} tokens"
        for pool in component.pools:
            yield pool.name, component.name, needs if pool.page_bytes else "no objects", pool.page_bytes


def _needs(component: Component) -> str:
    if component.span == SPAN_UNKNOWN:
        return "unknown"
    return "every page" if component.span == SPAN_ALL else f"the last {component.span:,}"


def _count_cells(count: ObjectCount) -> tuple[str, str]:
    return f"{count.objects_count:,}", size_text(count.object_bytes)


def _time_text(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


for _name, _command, _options in (
    ("stat", StatCommand, ""),
    ("verify", VerifyCommand, " --json"),
    ("scrub", ScrubCommand, ""),
    ("gc", GcCommand, " --bytes-max 400GiB"),
    ("clear", ClearCommand, " --all --yes"),
):
    _line = f"unified-cache storage {_name} file:kv-store{_options}"
    storage_app.command(_name, epilog=example(_line))(_command)
