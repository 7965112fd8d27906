"""Nodes of a tree with the keys of their pages, and what jobs move."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unified_cache.controller.jobs import BackupJob, ClearJob, FetchJob, LoadJob, ProbeJob, StoreJob
from unified_cache.controller.operation import Job
from unified_cache.core.page import PageKey, Prompt, key_chain, media_mark
from unified_cache.core.pool import PageCopies, Tier
from unified_cache.tree import RadixTree
from unified_cache.tree.node import Node

FLOWS: Mapping[type, tuple[Tier | None, Tier | None]] = {
    # job: (where the tree holds what it reads, where the slots are that it fills)
    BackupJob: (Tier.DEVICE, Tier.HOST),
    LoadJob: (Tier.HOST, Tier.DEVICE),
    StoreJob: (Tier.HOST, None),
    FetchJob: (None, Tier.HOST),
    ProbeJob: (None, None),
    ClearJob: (None, None),
}


@dataclass(frozen=True)
class Flow:
    """One live transfer: the pages it reads and fills."""

    prompt: Prompt
    source: Tier | None
    target: Tier | None
    parts: Sequence[PageCopies]


def flow_of(job: Job, prompt: Prompt) -> Flow:
    """Say what a job of an operation on ``prompt`` moves."""
    source, target = FLOWS[type(job)]
    found: Mapping[int, PageCopies] | Sequence[PageCopies] = vars(job).get("_parts", ())
    return Flow(prompt, source, target, tuple(found.values()) if isinstance(found, Mapping) else found)


def prompt_of(job: Job) -> Prompt:
    """Return the prompt whose pages a job moves, of the jobs that know it."""
    found = vars(job)["_prompt"]
    assert isinstance(found, Prompt)
    return found


def walk(tree: RadixTree) -> Iterator[tuple[Node, tuple[PageKey, ...]]]:
    """Yield every node but the roots with the keys of its pages, parents first."""
    todo = [(child, seed) for seed, root in tree.roots.items() for child in root.children.values()]
    while todo:
        node, above = todo.pop()
        marks = {page - node.start: media_mark(node.media, page, tree.page_size) for page in node.media}
        keys = key_chain(above, node.key, tree.page_size, marks)
        todo += [(child, keys[-1]) for child in node.children.values()]
        yield node, keys
