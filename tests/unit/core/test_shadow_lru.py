"""Shadow of an LRU cache: exact where the tree has all that it would have, bounded, soon aware that it is ahead."""

import random

from unified_cache.tree import LruComparison, shadow_lru
from unified_cache.tree.node import Node
from unified_cache.tree.shadow_lru import ShadowLru


class ShadowedDocuments:
    """Documents that never leave the tree, each a node below the root, and an LRU cache of whole pages beside it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.shadow = ShadowLru(capacity)
        self.nodes: dict[int, Node] = {}
        self.number = 0
        self.held: list[tuple[int, int]] = []
        """Pages that LRU holds, as (document, page), the next to go first."""

    def ask(self, document: int, pages: int) -> int:
        """Ask for a document; return the pages of it that LRU held."""
        self.number += 1
        asked = [(document, page) for page in range(pages)]
        kept = [page for page in asked if page in self.held]
        self.held = [page for page in self.held if page not in asked] + asked[::-1]
        self.held = self.held[max(len(self.held) - self.capacity, 0) :]
        node = self.nodes.get(document)
        path = [] if node is None else [node]
        self.shadow.arrive(self.number, path, pages if path else 0, [], pages)
        if node is None:
            node = self.nodes[document] = Node(b"", 0, pages, None, 1)
            node.used = self.number
        return len(kept)


def test_it_tells_what_lru_hits_page_by_page() -> None:
    rng = random.Random(1)
    documents = ShadowedDocuments(40)
    lengths = [rng.randrange(1, 12) for _ in range(12)]
    hits = asked = 0
    for _ in range(500):
        document = rng.randrange(12)
        hits += documents.ask(document, lengths[document])
        asked += lengths[document]
    found = documents.shadow.compared()
    assert found.lru_hit_pages == hits
    assert found.asked_pages == asked
    assert found.regret_pages == hits - found.hit_pages


def test_it_keeps_a_bounded_number_of_counts() -> None:
    documents = ShadowedDocuments(10**6)
    for document in range(3 * shadow_lru.BUCKETS_MAX):
        documents.number += 1
        documents.shadow.arrive(documents.number, [], 0, [], 1)
        node = documents.nodes[document] = Node(b"", 0, 1, None, 1)
        node.used = documents.number
    assert len(documents.shadow._buckets) <= shadow_lru.BUCKETS_MAX
    for number, node in enumerate(documents.nodes.values(), documents.number + 1):
        documents.shadow.arrive(number, [node], 1, [], 1)
    assert documents.shadow.compared().lru_hit_pages == len(documents.nodes)


def test_what_storage_has_brought_for_a_request_is_not_a_hit() -> None:
    documents = ShadowedDocuments(40)
    documents.ask(1, 5)
    documents.nodes[1].used = -documents.nodes[1].used
    documents.ask(1, 5)
    assert documents.shadow.compared() == LruComparison(asked_pages=10, hit_pages=0, lru_hit_pages=5)


def test_a_few_more_hits_of_lru_put_it_ahead_and_that_fades() -> None:
    shadow = ShadowLru(100)
    for number in range(1, 8):
        shadow.arrive(number, [], 0, [], 10)
    assert not shadow.is_ahead
    for number in range(1, 6):
        shadow.arrive(number + 7, [], 0, [(number, 10)], 10)
    assert shadow.compared().regret_pages == 50
    assert shadow.is_ahead
    for number in range(20, 20 + 4 * shadow_lru.RECENT_REQUESTS):
        shadow.arrive(number, [], 0, [], 1)
    assert not shadow.is_ahead


def test_what_a_clear_has_removed_is_no_hit_and_what_was_counted_stays() -> None:
    documents = ShadowedDocuments(40)
    documents.ask(1, 5)
    documents.ask(1, 5)
    documents.shadow.clear()
    documents.nodes.clear()
    documents.ask(1, 5)
    assert documents.shadow.compared() == LruComparison(asked_pages=15, hit_pages=5, lru_hit_pages=5)
