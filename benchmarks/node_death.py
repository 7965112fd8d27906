"""Prefixes that are left when a Mooncake node dies: by placement of pages, with what it costs in memory and puts.

    python -m benchmarks.node_death [--requests N] [--json FILE]

The blocks of the bundled trace are put into a cluster of three nodes of this machine as a cache puts them: for each
request those that are missing, 128 a call, at the time of the trace. Then a node is killed, and for each prompt it is
asked how many of its blocks could still be handed back from its beginning. The same for pages that the master places
(``spread``), for those of a prompt on one node (``together``), and for two replicas of each, placed by the master.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Annotated
from urllib.request import urlopen

import typer

from benchmarks.host_pages import announced_pages
from benchmarks.machine import machine
from benchmarks.report import write_json
from tests.support.mooncake import LocalCluster, MasterSettings
from unified_cache.core.seal import Label
from unified_cache.sizing.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.mooncake.client import MooncakeClient
from unified_cache.storage_backends.mooncake.endpoints import NodeChoice
from unified_cache.storage_backends.mooncake.native import PutConfig
from unified_cache.storage_backends.mooncake.store import MooncakeStorage, open_url
from unified_cache.storage_backends.protocol import Answer, Level, PageIO

TRACE = Path(__file__).parent.parent / "traces" / "mooncake_conversation.jsonl.gz"
KEPT = Path(__file__).parent / "results" / "node_death.json"
REQUESTS = 600
NODES = 3
SEGMENT_BYTES = 320 << 20
PAGE_KIB = 16
NEXT_REQUESTS = 20
"""Served after the death: they put again what they miss, and so what many prompts share."""
CALL_PAGES = 128
"""Objects in one call, as a cache puts them."""
ROUNDS = 3
"""Clusters of each kind; another node dies in each."""
SETTINGS = MasterSettings()
ALLOCATED = "master_allocated_bytes "
"""Begins the line among the master's metrics that says what is taken."""
FORGOTTEN_S = 5.0
"""After so long the master has forgotten a dead node."""


@dataclass(frozen=True, slots=True)
class DeathRound:
    """One cluster: what it held, and what was left."""

    before: float
    """Share of the blocks of all prompts that could be handed back."""
    after: float
    later: float
    """The same once ``NEXT_REQUESTS`` more have put what they missed."""
    put_us: float
    """For each block put."""
    bytes_put: float
    """Memory of the cluster for each byte put."""


def prompt_labels(request: TraceRequest, identity: bytes, pool: str) -> list[Label]:
    """Name the blocks of a prompt: an id stands for its block and all before it."""
    return [Label(identity, hashlib.sha256(b"%d" % block).digest(), pool) for block in request.hash_ids]


def restorable(storage: MooncakeStorage, prompts: Sequence[Sequence[Label]]) -> float:
    """Return the share of all blocks that could be handed back from the beginning of their prompts."""
    found = [takewhile(lambda answer: answer is Answer.HIT, storage.exists(prompt)) for prompt in prompts]
    return sum(len(list(prefix)) for prefix in found) / sum(map(len, prompts))


def put_as_asked(
    storage: MooncakeStorage, requests: Sequence[TraceRequest], template: PageIO, now: Callable[[float], None]
) -> tuple[float, int, list[list[Label]]]:
    """Put what each request misses; return the seconds of the puts, the blocks put, and all prompts."""
    seconds, count = 0.0, 0
    prompts: list[list[Label]] = []
    for request in requests:
        now(request.timestamp / 1000)
        labels = prompt_labels(request, template.label.identity, template.label.pool)
        found = storage.exists(labels)
        missing = [label for label, answer in zip(labels, found, strict=True) if answer is not Answer.HIT]
        for start in range(0, len(missing), CALL_PAGES):
            pages = [PageIO(label, template.buffers) for label in missing[start : start + CALL_PAGES]]
            began_s = time.perf_counter()
            answers = storage.put(pages, Level.CACHED)
            seconds += time.perf_counter() - began_s
            count += answers.count(Answer.STORED)
        prompts.append(labels)
    return seconds, count, prompts


@contextmanager
def replicas_of(client: MooncakeClient, count: int) -> Iterator[None]:
    """Have everything that a client puts have so many replicas."""
    plain = client.put_config

    def replicated(groups: Sequence[str] = (), *, pinned: bool = False, node: str = "") -> PutConfig:
        config = plain(groups, pinned=pinned, node=node)
        config.replica_num = count
        return config

    client.put_config = replicated  # type: ignore[method-assign]
    try:
        yield
    finally:
        client.put_config = plain  # type: ignore[method-assign]


def allocated_bytes(client: MooncakeClient) -> int:
    """Return the memory that the master counts as given away."""
    address = client.address
    with urlopen(f"http://{address.admin_host or address.host}:{address.admin_port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return int(next(line.removeprefix(ALLOCATED) for line in lines if line.startswith(ALLOCATED)))


def measure(requests: Sequence[TraceRequest], place: str, replicas: int, dies: int) -> DeathRound:
    """Fill a cluster, kill one of its nodes, and count what is left, then and after some requests more."""
    requests, later_requests = requests[:-NEXT_REQUESTS], requests[-NEXT_REQUESTS:]
    with (
        LocalCluster.running(NODES, SEGMENT_BYTES, SETTINGS) as cluster,
        closing(open_url(cluster.url.partition(":")[2], None)) as storage,
    ):
        client = storage._client
        at_s = [0.0]
        listing = client.admin.segments if place == "together" else frozenset
        client.choice = NodeChoice(listing, clock=lambda: at_s[0], seed=dies)
        (template,) = announced_pages(storage, PAGE_KIB, 1)

        def now(seconds: float) -> None:
            at_s[0] = seconds

        with replicas_of(client, replicas):
            seconds, count, prompts = put_as_asked(storage, requests, template, now)
        before = restorable(storage, prompts)
        held_bytes = allocated_bytes(client)
        cluster.nodes[dies].kill()
        time.sleep(FORGOTTEN_S)
        after = restorable(storage, prompts)
        put_as_asked(storage, later_requests, template, now)
        later = restorable(storage, prompts)
    page_bytes = sum(map(len, template.buffers))
    return DeathRound(before, after, later, seconds / count * 1e6, held_bytes / (count * page_bytes))


def main(
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of the trace.")] = REQUESTS,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="Figures are kept here.")] = KEPT,
) -> None:
    """Measure each placement."""
    asked = read_trace(TRACE, requests)
    kinds = {"spread": ("spread", 1), "together": ("together", 1), "two replicas": ("spread", 2)}
    found: dict[str, object] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine()),
        "requests": requests,
        "nodes": NODES,
        "page_kib": PAGE_KIB,
    }
    for name, (place, replicas) in kinds.items():
        rounds = [measure(asked, place, replicas, dies) for dies in range(ROUNDS)]
        found[name] = [asdict(each) for each in rounds]
        for each in rounds:
            print(
                f"{name:12}  before {each.before:.2%}, after {each.after:.2%}, later {each.later:.2%}, "
                f"put {each.put_us:.0f} us a block, {each.bytes_put:.2f} bytes of memory a byte",
                flush=True,
            )
    write_json(found, json_file)


if __name__ == "__main__":
    typer.run(main)
