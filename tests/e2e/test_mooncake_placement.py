"""Pages of one prompt lie on one node of a cluster, or on a pair: what a node that dies takes along."""

from contextlib import closing

from tests.support.clock import ManualClock
from tests.support.mooncake import LocalCluster
from tests.support.mooncake_needed import needs_mooncake
from tests.support.waiting import wait_until
from unified_cache.core.pool import Identity
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.mooncake.endpoints import STAY_S, NodeChoice
from unified_cache.storage_backends.mooncake.store import MooncakeStorage, open_url
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import LAYOUT, blank_page, label, open_for_contract, sealed_page

pytestmark = needs_mooncake

PAGE_BYTES = 16 << 10
PROMPT_PAGES = 20
FORGOTTEN_S = 10.0
"""After so long the master has noticed that a node is dead."""


COPIED_S = 60.0
"""Within so long nodes have made the copies that they were asked for."""


def opened(cluster: LocalCluster, options: str = "") -> MooncakeStorage:
    storage = open_url(cluster.url.partition(":")[2] + options, None)
    open_for_contract(storage)
    return storage


def put_prompt(storage: MooncakeStorage, number: int) -> list[str]:
    """Put the pages of a prompt; return the node of each."""
    pages = [sealed_page(label(number * PROMPT_PAGES + page), PAGE_BYTES) for page in range(PROMPT_PAGES)]
    assert storage.put(pages, Level.CACHED) == [Answer.STORED] * PROMPT_PAGES
    locations = storage._client.locate([page.label.object_name for page in pages])
    return [location.endpoint for location in locations.values()]


def whole(storage: MooncakeStorage, number: int) -> int:
    """Count the pages of a prompt that there are."""
    labels = [label(number * PROMPT_PAGES + page) for page in range(PROMPT_PAGES)]
    return storage.exists(labels).count(Answer.HIT)


def test_a_node_that_dies_takes_whole_prompts_and_the_next_ones_go_elsewhere() -> None:
    clock = ManualClock()
    with LocalCluster.running(3) as cluster, closing(opened(cluster)) as storage:
        client = storage._client
        client.choice = NodeChoice(client.admin.segments, client.endpoints, clock, seed=0)
        nodes = []
        for number in range(12):
            placed = put_prompt(storage, number)
            assert placed == placed[:1] * PROMPT_PAGES
            nodes += placed[:1]
            clock.now_s += STAY_S
        assert len(set(nodes)) == 3
        cluster.nodes[0].kill()
        assert wait_until(lambda: len(client.admin.segments()) == 2, FORGOTTEN_S), "the master notices"
        left = dict(zip(range(12), (whole(storage, number) for number in range(12)), strict=True))
        (dead,) = {node for number, node in enumerate(nodes) if not left[number]}
        assert left == {number: 0 if node == dead else PROMPT_PAGES for number, node in enumerate(nodes)}
        lost = nodes.index(dead)
        clock.now_s += 100
        assert len(set(put_prompt(storage, lost))) == 1
        assert whole(storage, lost) == PROMPT_PAGES


def hits(storage: MooncakeStorage, numbers: range) -> int:
    """Read the pages of prompts; count those that were right."""
    verified = VerifiedStorage(storage)
    read = [
        verified.get([blank_page(label(number * PROMPT_PAGES + page), PAGE_BYTES) for page in range(PROMPT_PAGES)])
        for number in numbers
    ]
    return sum(answers.count(Answer.HIT) for answers in read)


def have_two_nodes(storage: MooncakeStorage, numbers: range) -> bool:
    names = [label(number * PROMPT_PAGES + page).object_name for number in numbers for page in range(PROMPT_PAGES)]
    found = storage._client.locate(names)
    return len(found) == len(names) and all(location.others for location in found.values())


def test_nodes_that_die_one_after_the_other_cost_no_page_that_lies_on_two() -> None:
    clock, prompts, more = ManualClock(), range(8), range(8, 12)
    with LocalCluster.running(4) as cluster, closing(opened(cluster, "&replicas=2")) as storage:
        client = storage._client
        assert storage.capability().bytes_max == (client.admin.capacity_bytes() or 0) // 2
        client.choice = NodeChoice(client.admin.segments, client.endpoints, clock, seed=0)
        models = [manifest_of(Identity(f"model {number}"), LAYOUT) for number in prompts]
        for number in prompts:
            storage.register(models[number], {})
            assert len(set(put_prompt(storage, number))) == 1, "one pair"
            clock.now_s += STAY_S
        assert have_two_nodes(storage, prompts)
        cluster.nodes[0].kill()
        with closing(opened(cluster, "&replicas=2&host=127.0.0.1")) as newcomer:
            for model in models:
                newcomer.register(model, {})
            assert hits(newcomer, prompts) == len(prompts) * PROMPT_PAGES, "before the master notices"
        assert hits(storage, prompts) == len(prompts) * PROMPT_PAGES, "before the master notices"
        for number in more:
            put_prompt(storage, number)
            clock.now_s += STAY_S
        assert wait_until(lambda: len(client.admin.segments()) == 3, FORGOTTEN_S), "the master notices"
        both = range(more.stop)
        assert hits(storage, both) == len(both) * PROMPT_PAGES
        clock.now_s += 100
        assert wait_until(lambda: have_two_nodes(storage, both), COPIED_S), "what lost one gets another"
        cluster.nodes[1].kill()
        assert hits(storage, both) == len(both) * PROMPT_PAGES
