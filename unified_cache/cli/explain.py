"""``unified-cache explain``: how far prompts can be resumed from a store alone, and what is missing for more."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import typer

from unified_cache.cache.explain.explanation import (
    Explainer,
    Explanation,
    StoredPages,
    StoreSilence,
    present_pages,
    stored_history,
)
from unified_cache.cache.explain.near import NearMatch, namespace_differences, near_in_store
from unified_cache.cli.options import IdentityOption, JsonOptions, NamespaceOptions, TokensFileOption
from unified_cache.cli.progress import watched
from unified_cache.cli.text import console_on, example
from unified_cache.core.errors import without_secrets
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.seal import Label
from unified_cache.storage_backends.manifest import Description
from unified_cache.storage_backends.offline.prompts import read_prompts
from unified_cache.storage_backends.offline.stores import choose, open_to_read
from unified_cache.storage_backends.protocol import StorageReader

__all__ = ["ExplainCommand", "explain_app"]

explain_app = typer.Typer(rich_markup_mode="markdown")

REMEMBERS = "nothing: a store does not say what it had; ask the cache itself, UnifiedCache.explain"


@dataclass(frozen=True, slots=True)
class ExplainCommand(JsonOptions, NamespaceOptions):
    """Explain how long a prefix of each prompt in a file a store can restore, and which page is missing for more.

    By component which pages the store has, how far a resume could go, and which page is missing for one more. Where it
    has none, it is asked for the same tokens under its other identities, and without a namespace. It reads no page.
    """

    storage: Annotated[
        str,
        typer.Option("--storage", metavar="URL", help="Store: file:DIR, packed:DIR, grpc://HOST or mooncake://HOST."),
    ]
    tokens: TokensFileOption
    identity: IdentityOption = None

    def run(self) -> None:
        """Ask and show."""
        namespace = self.namespace
        with closing(open_to_read(self.storage)) as storage:
            kept = choose(storage, self.storage, self.identity)
            description = kept.described()
            prompts = read_prompts(self.tokens, description.layout.page_size, namespace)
            explained: list[Explanation] = []
            with watched(sys.stderr, "explain", len(prompts), "prompts") as on_progress:
                for prompt in prompts:
                    explained.append(_explained(storage, kept.digest, description, prompt, namespace))
                    on_progress(len(explained), "")
        value = {
            "store": without_secrets(self.storage),
            "identity": kept.digest.hex(),
            "prompts": [explanation.as_json() for explanation in explained],
        }
        if not self.shown_as_json("explain", value):
            _print_explained(explained)


def _explained(
    storage: StorageReader, owner: bytes, description: Description, prompt: Prompt, namespace: Namespace
) -> Explanation:
    layout = description.layout
    layout.check_page_sizes({pool.name for pool in layout.pools})
    pools = [[pool.name for pool in component.pools if pool.page_bytes] for component in layout.components]
    labels = [Label(owner, key, pool) for names in pools for pool in names for key in prompt.keys]
    stored: StoredPages | StoreSilence = present_pages(
        storage.exists(labels), [len(names) for names in pools], prompt.pages_count
    )
    near: tuple[NearMatch, ...] = ()
    if isinstance(stored, StoredPages) and not stored.present[0].any():
        plain = Prompt(prompt.tokens, prompt.page_size, b"")
        under = [] if prompt.root == b"" or prompt.first else [(plain, namespace_differences(namespace, Namespace()))]
        near = near_in_store(storage, prompt, description, {name: owner for names in pools for name in names}, under)
    explainer = Explainer(layout.components, layout.page_size, None, 0.0)
    histories = stored_history(stored, len(layout.components), prompt.pages_count)
    return explainer.explain([("storage", histories)], prompt.pages_count, near, REMEMBERS)


def _print_explained(explained: Sequence[Explanation]) -> None:
    console = console_on(sys.stdout)
    for number, explanation in enumerate(explained, 1):
        first, *rest = str(explanation).splitlines()
        console.print_line(f"prompt {number}: {first}", style="bold")
        for line in rest:
            console.print_line(line)


explain_app.command(
    "explain", epilog=example("unified-cache explain --storage file:/var/cache/kv --tokens prompts.jsonl")
)(ExplainCommand)
