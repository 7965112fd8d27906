"""``unified-cache backup`` and ``unified-cache prefetch``: pages from one store to another, without an engine.

Both verify every object that they read, write none that is flawed, and skip what the target has. After an interruption
the same command goes on where it stopped.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.explain import WHY_ONE_LESS
from unified_cache.cli.options import (
    TOKENS_HELP,
    IdentityOption,
    JsonOptions,
    NamespaceOptions,
    TokensFileOption,
)
from unified_cache.cli.progress import objects_watched
from unified_cache.cli.storage import findings_as_json, print_findings
from unified_cache.cli.text import console_on
from unified_cache.cli.tool_calls import open_in_time
from unified_cache.core.errors import CacheError, ConfigError, without_secrets
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.sizes import size_text
from unified_cache.storage_backends.memory import KeysOnlyStorage
from unified_cache.storage_backends.offline.copying import (
    CopyResult,
    Prefetched,
    PrefixPrefetch,
    copy_identity,
    copy_planned,
    plan_prompts,
)
from unified_cache.storage_backends.offline.listing import count_objects, total_of
from unified_cache.storage_backends.offline.prompts import read_prompts
from unified_cache.storage_backends.offline.stores import (
    StoredIdentity,
    check_apart,
    choose,
    is_absent,
    open_pages_to_read,
    open_to_write,
    selected,
)
from unified_cache.storage_backends.protocol import Store

BACKUP_EPILOG = """**Examples**

Everything that a store holds, then again what was added since:

    unified-cache backup file:kv-store file:kv-backup

The system prompts of one tenant:

    unified-cache backup file:kv-store file:seed --prefix prompts.jsonl --namespace tenant=acme
"""

PREFETCH_EPILOG = """**Examples**

    seq 0 4095 > prompt.txt

    unified-cache prefetch file:kv-backup --into file:kv-store --tokens prompt.txt

    unified-cache prefetch file:seed --into my_stores.redis:connect:cache-1 --tokens prompts.jsonl --json
"""

backup_app = typer.Typer(rich_markup_mode="markdown")

SOURCE_HELP = "Store to read: file:DIR, packed:DIR or package.module:factory."
TARGET_HELP = "Store to write, made if absent: file:DIR, packed:DIR or package.module:factory."

SourceArgument = Annotated[str, typer.Argument(metavar="SRC", help=SOURCE_HELP)]


@dataclass(frozen=True, slots=True)
class BackupCommand(JsonOptions, NamespaceOptions):
    """Copy everything of a store, or of one identity, or the pages of some prompts, into another store.

    Every object is verified; a flawed one is reported and not copied. Objects that DST has at their right length are
    skipped, so an interrupted backup goes on where it stopped. With --prefix only the chains of the prompts in a file
    are copied, in the namespace that the options name: a page's name is a digest, and no store can list its namespaces.
    """

    source: SourceArgument
    target: Annotated[str, typer.Argument(metavar="DST", help=TARGET_HELP)]
    prefix: Annotated[Path | None, typer.Option(metavar="TOKENS_FILE", help=TOKENS_HELP)] = None
    identity: IdentityOption = None

    def run(self) -> None:
        """Copy and show."""
        namespace = self.namespace
        if self.prefix is None and namespace != Namespace():
            raise ConfigError("a namespace needs --prefix TOKENS_FILE: without tokens a page's namespace is unknown")
        with closing(_opened(self.source, self.target)) as source:
            if self.prefix is None:
                found = selected(source, self.source, self.identity)
                for kept in found:
                    kept.described()
                with closing(open_in_time(open_to_write, self.target)) as target:
                    results = [_copied(source, target, kept) for kept in found]
            else:
                found = [choose(source, self.source, self.identity)]
                description = found[0].described()
                prompts = read_prompts(self.prefix, description.layout.page_size, namespace)
                if is_absent(self.target):
                    plan = plan_prompts(source, KeysOnlyStorage(), description, prompts)
                    _check_any(len(plan.tasks), self.source, self.prefix)
                with closing(open_in_time(open_to_write, self.target)) as target:
                    plan = plan_prompts(source, target, description, prompts)
                    with objects_watched(sys.stderr, "backup", plan.todo.objects_count) as watch:
                        results = [copy_planned(source, target, plan, watch)]
                _check_any(len(plan.tasks) + plan.skipped.objects_count, self.source, self.prefix)
        identities = [_copied_as_json(*each) for each in zip(found, results, strict=True)]
        value = {
            "source": without_secrets(self.source),
            "target": without_secrets(self.target),
            "identities": identities,
        }
        if not self.shown_as_json("backup", value):
            _print_copied(zip(found, results, strict=True))
        _check_complete(results, self.source, self.target)


@dataclass(frozen=True, slots=True)
class PrefetchCommand(JsonOptions, NamespaceOptions):
    """Copy what the longest restorable prefixes of some prompts need from one store into another.

    Copies what a resume at the end of the prefix needs and DST lacks: every page of full attention, and of every other
    component the window before the end. Where a page is flawed, or DST has no room for it, the next shorter restorable
    prefix is copied.
    """

    source: SourceArgument
    target: Annotated[str, typer.Option("--into", metavar="DST", help=TARGET_HELP)]
    tokens: TokensFileOption
    identity: IdentityOption = None

    def run(self) -> None:
        """Copy and show what can be restored from DST now."""
        namespace = self.namespace
        with closing(_opened(self.source, self.target)) as source:
            kept = choose(source, self.source, self.identity)
            description = kept.described()
            page_size = description.layout.page_size
            prompts = read_prompts(self.tokens, page_size, namespace)
            if is_absent(self.target):
                planned = PrefixPrefetch(source, KeysOnlyStorage(), description, prompts).plan
                _check_any(len(planned.tasks), self.source, self.tokens)
            with closing(open_in_time(open_to_write, self.target)) as target:
                prefetch = PrefixPrefetch(source, target, description, prompts)
                with objects_watched(sys.stderr, "prefetch", prefetch.plan.todo.objects_count) as watch:
                    found, result = prefetch.run(watch)
        value = {
            "source": without_secrets(self.source),
            "target": without_secrets(self.target),
            "page_size": page_size,
            "prompts": [_prefetched_as_json(each, page_size) for each in found],
            **_copied_as_json(kept, result),
        }
        if not self.shown_as_json("prefetch", value):
            _print_prefetched(prompts, found, page_size)
            _print_copied([(kept, result)])
        _check_any(sum(each.promised_pages for each in found), self.source, self.tokens)
        _check_complete([result], self.source, self.target)
        short = sum(each.restorable_pages < each.promised_pages for each in found)
        if short:
            raise CacheError(f"{short} of {len(found)} prefixes in DST are shorter than both stores promised")


def _opened(source_url: str, target_url: str) -> Store:
    """Open the source. The target is opened when everything else is known to be right: until then nothing is made."""
    check_apart(source_url, target_url)
    return open_in_time(open_pages_to_read, source_url)


def _copied(source: Store, target: Store, kept: StoredIdentity) -> CopyResult:
    with objects_watched(sys.stderr, "count", None) as watch:
        total = total_of([count_objects(source, kept.digest, watch)])
    with objects_watched(sys.stderr, "backup", total.objects_count) as watch:
        return copy_identity(source, target, kept.described(), watch)


def _check_any(found_count: int, source: str, tokens: Path) -> None:
    if not found_count:
        raise CacheError(
            f"{without_secrets(source)} must hold pages of the prompts in {tokens}, found none; "
            "check tokens, namespace and --identity"
        )


def _check_complete(results: Iterable[CopyResult], source: str, target: str) -> None:
    flawed = sum(result.findings.total for result in results)
    declined = sum(result.declined_count for result in results)
    if flawed or declined:
        raise CacheError(
            f"{without_secrets(target)} must hold all of it, but {flawed} objects of {without_secrets(source)} "
            f"are flawed or cannot be read, "
            f"and {declined} found no room"
        )


def _print_copied(copies: Iterable[tuple[StoredIdentity, CopyResult]]) -> None:
    console = console_on(sys.stdout)
    for kept, result in copies:
        console.print_line(
            f"{kept.short_name}: copied {result.copied.objects_count:,} objects, "
            f"{size_text(result.copied.object_bytes)}; {result.skipped.objects_count:,} were there; "
            f"{result.findings.total:,} flawed, {result.declined_count:,} without room, {result.gone_count:,} gone"
        )
        print_findings(console, [result.findings])


def _print_prefetched(prompts: Sequence[Prompt], found: Sequence[Prefetched], page_size: int) -> None:
    columns = ("prompt", "whole pages", "restorable pages", "restorable tokens")
    counts = (
        (number, each.prompt_pages, each.restorable_pages, each.restorable_pages * page_size)
        for number, each in enumerate(found, 1)
    )
    console = console_on(sys.stdout)
    console.print_table(columns, (tuple(map("{:,}".format, each)) for each in counts), left=0)
    if any(each.reusable_pages < there.restorable_pages for each, there in zip(prompts, found, strict=True)):
        console.print_line(f"of a prompt that ends with its last page an engine takes one less: {WHY_ONE_LESS}")


def _copied_as_json(kept: StoredIdentity, result: CopyResult) -> dict[str, object]:
    return {
        "identity": kept.digest.hex(),
        "copied_objects": result.copied.objects_count,
        "copied_bytes": result.copied.object_bytes,
        "skipped_objects": result.skipped.objects_count,
        "gone_objects": result.gone_count,
        "declined_objects": result.declined_count,
        "findings": findings_as_json(result.findings),
    }


def _prefetched_as_json(found: Prefetched, page_size: int) -> dict[str, int]:
    return {
        "prompt_pages": found.prompt_pages,
        "promised_pages": found.promised_pages,
        "restorable_pages": found.restorable_pages,
        "restorable_tokens": found.restorable_pages * page_size,
    }


backup_app.command("backup", epilog=BACKUP_EPILOG)(BackupCommand)
backup_app.command("prefetch", epilog=PREFETCH_EPILOG)(PrefetchCommand)
