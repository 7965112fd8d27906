"""One storage node as a process: ``python -m unified_cache.cluster.storage_node SETTINGS``.

A process of its own, since Mooncake's setup and close let nothing else run. It reports once on standard output, and
ends gracefully on SIGTERM: the master then forgets its pages at once.
"""

import signal
import sys
import time
from contextlib import closing

from unified_cache.cluster.child import STOP_SIGNALS, StartReport, report_stream
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.host_port import claim
from unified_cache.cluster.node import NodeSettings
from unified_cache.cluster.signals import await_signal
from unified_cache.errors import ConfigError
from unified_cache.storage_backends.mooncake.native import METADATA, NativeStore, load_store

__all__ = ["main"]

HEALTH_INTERVAL_S = 1.0


def main(settings: NodeSettings) -> int:
    """Serve until told to stop; return the exit status."""
    # Before Mooncake starts its threads, which inherit it: signals are for ``await_signal`` alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    stream = report_stream()
    try:
        holder = claim(settings.address.host, settings.address.port)
    except OSError as error:
        taken = f"the address {settings.address} must be free on this machine, found: {error.strerror or error}"
        StartReport(taken, refused=True).send(stream)
        return 2
    with closing(holder):
        try:
            store = load_store()
        except ConfigError as error:
            StartReport(str(error), refused=True).send(stream)
            return 2
        code = store.setup(
            str(settings.address),
            METADATA,
            settings.segment_bytes,
            0,
            settings.transport.value,
            "",
            str(settings.master),
        )
        if code:
            # The code tells nothing apart, and sizes and names were looked at before: mostly it is the master.
            reason = f"{settings.master} takes no segment of {settings.segment_bytes} bytes in (setup: {code})"
            StartReport(f"{reason}; is it a Mooncake master's RPC address?").send(stream)
            return 1
        StartReport().send(stream)
        _watch(store, EventLog(sys.stderr, time.time), settings)
        store.close()
    return 0


def _watch(store: NativeStore, log: EventLog, settings: NodeSettings) -> None:
    """Say when the master is lost and back, until a signal comes. The node joins again by itself."""
    fields = {"node": str(settings.address), "master": str(settings.master)}
    healthy = True
    while await_signal(STOP_SIGNALS, HEALTH_INTERVAL_S) is None:
        now_healthy = store.health_check() == 0
        if now_healthy != healthy:
            log.write("master_back" if now_healthy else "master_lost", fields)
        healthy = now_healthy


if __name__ == "__main__":
    sys.exit(main(NodeSettings.from_json(sys.argv[1])))
