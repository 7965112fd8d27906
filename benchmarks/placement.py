"""``python -m benchmarks.placement [--check] [NODES...]``: how placements of pages on a cluster's nodes grow.

Engines, one for eight nodes, each replay the bundled trace with prompts of their own. A page is put once and read from
its first node. Placements: ``ours`` is ``NodeChoice``, by the second; ``prompt`` draws nodes for each prompt's new
pages; ``page`` draws them for each page. Columns: reads of the hottest node and pages on the fullest, over the mean;
share of pages lost, and of page references that no longer follow a whole prefix, by so many random dead nodes; and
share of the bytes that are copied when a node dies. When one comes, nothing moves. ``--check`` puts the same pages into
real clusters of 3 and 8 nodes, and compares what lies where.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tests.support.clock import ManualClock
from tests.support.mooncake import LocalCluster
from tests.support.waiting import wait_until
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.mooncake.endpoints import Endpoints, NodeChoice
from unified_cache.storage_backends.mooncake.store import open_url
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import label, open_for_contract, sealed_page

TRACE = Path(__file__).resolve().parent.parent / "traces" / "mooncake_conversation_1000.jsonl.gz"
PLACEMENTS = ("ours", "prompt", "page")
NODES_PER_ENGINE = 8
DEATHS = (1, 2, 3)
TRIALS, TRIALS_MIN = 320, 2
"""Of each number of deaths, divided by the nodes: each death takes the fewer pages, the more nodes there are."""
CHECKED_REQUESTS = 100
PAGE_BYTES = 4 << 10

Place = tuple[int, ...]
"""Nodes of a page, first the one that is read."""


class Placed(NamedTuple):
    """Pages of one engine with their nodes, by number, and the pages that each request refers to."""

    places: dict[int, Place]
    requests: list[tuple[int, ...]]


def draws(placement: str, nodes: Sequence[str], replicas: int, seed: int) -> Callable[[float, bool], Sequence[str]]:
    """Return what names the nodes of a page, by the time in seconds and whether it begins a prompt's new pages."""
    now_s = 0.0
    drawn = random.Random(seed)
    choice = NodeChoice(lambda: frozenset(nodes), Endpoints(lambda: now_s), lambda: now_s, seed)
    last: Sequence[str] = ()

    def draw(at_s: float, begins: bool) -> Sequence[str]:
        nonlocal now_s, last
        now_s = at_s
        if placement == "ours":
            last = choice.nodes(replicas) if begins else last
        elif placement == "page" or begins:
            last = drawn.sample(nodes, replicas)
        return last

    return draw


def place(
    trace: Sequence[TraceRequest], placement: str, nodes: Sequence[str], replicas: int, seed: int, start_s: float
) -> Placed:
    """Put the pages of a trace as they first come."""
    draw = draws(placement, nodes, replicas, seed)
    number_of = {node: number for number, node in enumerate(nodes)}
    places: dict[int, Place] = {}
    for request in trace:
        begins = True
        for page in request.hash_ids:
            if page not in places:
                drawn = draw(start_s + request.timestamp / 1000, begins)
                places[page] = tuple(number_of[node] for node in drawn)
                begins = False
    return Placed(places, [request.hash_ids for request in trace])


def over_mean(counts: Counter[int], nodes: int) -> float:
    """Return the largest count over the mean."""
    return max(counts.values()) * nodes / counts.total()


def lost(engines: Sequence[Placed], dead: set[int]) -> tuple[float, float]:
    """Return the share of pages that are gone, and of references that follow no whole prefix any more."""
    gone = pages = cut = references = 0
    for places, requests in engines:
        away = {page for page, held in places.items() if dead.issuperset(held)}
        gone, pages = gone + len(away), pages + len(places)
        for request in requests:
            first = (
                next((at for at, page in enumerate(request) if page in away), len(request)) if away else len(request)
            )
            cut, references = cut + len(request) - first, references + len(request)
    return gone / pages, cut / references


def row(trace: Sequence[TraceRequest], placement: str, nodes_count: int, replicas: int) -> str:
    """Simulate one cluster; return its line of the table."""
    drawn = random.Random(nodes_count)
    nodes = [f"node{number:04}" for number in range(nodes_count)]
    engines = [
        place(trace, placement, nodes, replicas, drawn.randrange(1 << 32), 300 * drawn.random())
        for _ in range(max(1, nodes_count // NODES_PER_ENGINE))
    ]
    reads = Counter(each.places[page][0] for each in engines for request in each.requests for page in request)
    held = Counter(node for each in engines for place in each.places.values() for node in place)
    losses = []
    for deaths in DEATHS:
        trials = [
            lost(engines, set(drawn.sample(range(nodes_count), deaths)))
            for _ in range(max(TRIALS_MIN, TRIALS // nodes_count))
        ]
        losses += [fmean(pages for pages, _ in trials), fmean(cut for _, cut in trials)]
    copied = replicas > 1 and held.total() / nodes_count / sum(len(each.places) for each in engines)
    figures = " ".join(f"{share:8.4f}" for share in losses)
    hottest, fullest = over_mean(reads, nodes_count), over_mean(held, nodes_count)
    return f"{nodes_count:5} {replicas:2} {placement:6} {hottest:6.2f} {fullest:6.2f} {figures} {float(copied):7.4f}\n"


def check(trace: Sequence[TraceRequest], nodes_count: int) -> str:
    """Put the pages of a few requests into a real cluster, kill a node, and compare with the simulation."""
    clock = ManualClock()
    with LocalCluster.running(nodes_count) as cluster:
        storage = open_url(cluster.url.partition(":")[2], None)
        open_for_contract(storage)
        client = storage._client
        nodes = sorted(cluster.admin.segments())
        client.choice = NodeChoice(client.admin.segments, client.endpoints, clock, seed=7)
        simulated = place(trace, "ours", nodes, 1, 7, clock.now_s)
        start_s = clock.now_s
        put: set[int] = set()
        for request in trace:
            clock.now_s = start_s + request.timestamp / 1000
            fresh = [page for page in request.hash_ids if page not in put]
            put.update(fresh)
            assert all(storage.put([sealed_page(label(page), PAGE_BYTES) for page in fresh], Level.CACHED))
        names = {label(page).object_name: page for page in put}
        held = Counter(each.endpoint for each in client.locate(list(names)).values())
        cluster.nodes[0].kill()
        assert wait_until(lambda: len(client.admin.segments()) == nodes_count - 1, 10), "the master notices"
        gone = len(put) - sum(map(bool, storage.exists([label(page) for page in put])))
        storage.close()
    expected = Counter(node for (node,) in simulated.places.values())
    sizes, real = sorted(expected.values()), sorted(held.values())
    return f"{nodes_count} real nodes: pages {real}, simulated {sizes}; a killed one took {gone} of {len(put)}\n"


def main() -> None:
    """Print the table, after what was checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", nargs="*", type=int, default=[3, 8, 64, 1000])
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    trace = read_trace(TRACE)
    if chosen.check:
        for nodes_count in (3, 8):
            sys.stdout.write(check(trace[:CHECKED_REQUESTS], nodes_count))
    sys.stdout.write(
        "nodes re place  reads  pages  lost by one: pages, prefixes; by two; by three" + " " * 10 + "copied\n"
    )
    for nodes_count in chosen.nodes:
        for replicas in (1, 2):
            for placement in PLACEMENTS:
                sys.stdout.write(row(trace, placement, nodes_count, replicas))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
