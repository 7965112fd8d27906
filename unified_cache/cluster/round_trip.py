"""Put a page on each of some nodes and get it back: ``python -m unified_cache.cluster.round_trip REQUEST``.

A process of its own, which gives no memory; it reports once on standard output.
"""

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from unified_cache.cluster.child import StartReport, report_stream
from unified_cache.storage_backends.mooncake.native import METADATA, NativeStore, load_store, new_put_config

__all__ = ["main", "travel"]

PAGE_BYTES = 4096


def travel(store: NativeStore, master: str, nodes: Sequence[str], protocol: str) -> StartReport:
    """Visit each node and return; report the first that does not work."""
    code = store.setup(master.rpartition(":")[0], METADATA, 0, 0, protocol, "", master)
    if code:
        return StartReport(f"no master at {master} takes a client in (setup: {code})")
    sent = ctypes.create_string_buffer(os.urandom(PAGE_BYTES), PAGE_BYTES)
    came = ctypes.create_string_buffer(PAGE_BYTES)
    for page in (sent, came):
        store.register_buffer(ctypes.addressof(page), PAGE_BYTES)
    endpoints: set[str] = set()
    for number, node in enumerate(nodes):
        placement = new_put_config()
        placement.preferred_segment = node
        key = f"unified-cache/round-trip/{os.urandom(8).hex()}/{number}"
        (stored,) = store.batch_put_from([key], [ctypes.addressof(sent)], [PAGE_BYTES], placement)
        if stored:
            return StartReport(
                f"others cannot reach the node at {node}: a page put there did not arrive (put: {stored})"
            )
        (replica,) = store.batch_get_replica_desc([key])[key]
        endpoints.add(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint)
        ctypes.memset(came, 0, PAGE_BYTES)
        (read,) = store.batch_get_into([key], [ctypes.addressof(came)], [PAGE_BYTES])
        store.batch_remove([key], True)
        if read != PAGE_BYTES or came.raw != sent.raw:
            return StartReport(f"a page put on the node at {node} did not come back (get: {read})")
    if len(endpoints) < len(nodes):
        # Mooncake puts a page elsewhere, and says nothing, where it does not know the node or the node is full.
        return StartReport(
            f"the nodes {', '.join(nodes)} are not all there: pages went to {', '.join(sorted(endpoints))}"
        )
    return StartReport()


def main(master: str, nodes: Sequence[str], protocol: str) -> NoReturn:
    """Travel, report, and end."""
    stream = report_stream()
    travel(load_store(), master, nodes, protocol).send(stream)
    # Without close, which takes a second: the master forgets by itself a client that gave nothing.
    os._exit(0)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
