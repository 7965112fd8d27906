"""``unified-cache explain``: how far prompts can be resumed from a store alone, and what is missing for more."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import typer

from unified_cache.cache.explain import Explanation, explanation_of, near_in_store, stored_pages
from unified_cache.cli.options import IdentityOption, JsonOptions, NamespaceOptions, TokensFileOption
from unified_cache.cli.progress import watched
from unified_cache.cli.text import console_on, example
from unified_cache.cli.tool_calls import open_in_time
from unified_cache.core.errors import without_secrets
from unified_cache.core.page import Prompt
from unified_cache.storage_backends.manifest import Description
from unified_cache.storage_backends.offline.prompts import read_prompts
from unified_cache.storage_backends.offline.stores import choose, open_to_read
from unified_cache.storage_backends.protocol import Store

WHY_ONE_LESS = "it computes the last token of a prompt itself"
"""Why an engine leaves the last page of a prompt that ends with it."""

explain_app = typer.Typer(rich_markup_mode="markdown")


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
        with closing(open_in_time(open_to_read, self.storage)) as storage:
            kept = choose(storage, self.storage, self.identity)
            description = kept.described()
            prompts = read_prompts(self.tokens, description.layout.page_size, self.namespace)
            explained: list[Explanation] = []
            with watched(sys.stderr, "explain", len(prompts), "prompts") as on_progress:
                for prompt in prompts:
                    explained.append(_explained(storage, kept.digest, description, prompt))
                    on_progress(len(explained), "")
        value = {
            "store": without_secrets(self.storage),
            "identity": kept.digest.hex(),
            "prompts": [explanation.as_json() for explanation in explained],
        }
        if not self.shown_as_json("explain", value):
            _print_explained(prompts, explained)


def _explained(storage: Store, owner: bytes, description: Description, prompt: Prompt) -> Explanation:
    layout = description.layout
    layout.check_page_sizes({pool.name for pool in layout.pools})
    owners = {pool.name: owner for pool in layout.pools}
    stored = stored_pages(storage, layout, owners, prompt)
    is_absent = stored is not None and not stored[0].any()
    near = near_in_store(storage, prompt, description, owners) if is_absent else []
    return explanation_of(layout, prompt.pages_count, {"storage": stored}, near)


def _print_explained(prompts: Sequence[Prompt], explained: Sequence[Explanation]) -> None:
    console = console_on(sys.stdout)
    for number, (prompt, explanation) in enumerate(zip(prompts, explained, strict=True), 1):
        first, *rest = str(explanation).splitlines()
        console.print_line(f"prompt {number}: {first}", style="bold")
        for line in rest:
            console.print_line(line)
        if prompt.reusable_pages < explanation.end:
            console.print_line(f"an engine takes {prompt.reusable_pages:,} of them: {WHY_ONE_LESS}")


explain_app.command(
    "explain",
    epilog=example("seq 0 4095 > prompt.txt", "unified-cache explain --storage file:kv-store --tokens prompt.txt"),
)(ExplainCommand)
