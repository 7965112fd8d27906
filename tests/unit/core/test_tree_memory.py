"""Memory of nodes and queues under adaptive eviction: little more than under lru, whatever is asked for."""

from benchmarks.generated_traces import generated_trace
from benchmarks.policies import TreeEngine
from benchmarks.tree_memory import ADDED_NODE_BYTES_MAX, served
from unified_cache.core.config import EvictionPolicy
from unified_cache.core.page import Prompt
from unified_cache.sizing.replay.trace import BLOCK_TOKENS
from unified_cache.tree import RadixTree
from unified_cache.tree.eviction_queues import STALE_MIN, STALE_PART


def entries_and_nodes(tree: RadixTree) -> tuple[int, int, int]:
    """Count the entries of all queues of a tree, dead nodes among them, and the nodes of the tree."""
    queues = tree._state.queues
    queued = [node for queue_id in range(queues.queues_count) for node, _ in queues.entries(queue_id)]
    return len(queued), len({id(node) for node in queued if node.dead}), tree.nodes_count()


def serve(kind: str, requests: int, device_pages: int) -> RadixTree:
    engine = TreeEngine(device_pages, EvictionPolicy.ADAPTIVE)
    for request in generated_trace(kind, requests, 0):
        engine.serve(Prompt.of(request.tokens(), BLOCK_TOKENS).head(device_pages))
    return engine.ledger.tree


def test_a_node_takes_hardly_more_memory_than_under_lru() -> None:
    lru, adaptive = (served("agents", 4_000, policy) for policy in (EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE))
    assert lru.nodes == adaptive.nodes > 3_000
    assert adaptive.node_bytes - lru.node_bytes <= ADDED_NODE_BYTES_MAX


def test_prompts_asked_for_again_and_again_leave_few_entries_behind_as_their_kind_changes() -> None:
    entries, _, nodes = entries_and_nodes(serve("uniform", 4_000, device_pages=20_000))
    assert nodes == 600
    assert entries <= nodes + max(STALE_MIN, entries // STALE_PART)


def test_queues_keep_few_nodes_in_memory_that_have_left_the_tree() -> None:
    entries, dead, nodes = entries_and_nodes(serve("scans", 4_000, device_pages=2_000))
    assert nodes > 100
    assert 0 < dead <= max(STALE_MIN, entries // STALE_PART)
