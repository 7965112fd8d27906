"""Pages that lie in an engine's own host memory, kept in any store: the room between an engine's adapter and a store.

    store        ``EngineStore``: never raises on a page, answers why, returns by its deadline
    interface    its settings, pages, reasons and counts; that nothing is restored, once in the log
    calls        what one call asks of a store, piece by piece, and the two paths of a page: buffered, zero-copy
    buffers      bounce buffers, where a store that is late may still write
    pools        several pools over one store: how long a prefix can be restored, and their pages there and back

An engine's rows have no room for our header, and belong to another request as soon as a call has returned. So a page
that may have to be waited for is read, header and payload, into a bounce buffer, verified there, and its payload copied
into the rows; a page in memory is read into the rows by its caller. A page to be stored is copied and sealed first.
No module here knows an engine, or needs torch.
"""

from unified_cache.integrations.engine_store.interface import (
    EnginePage,
    EngineStoreConfig,
    EngineStoreCounts,
    HitWatch,
    Unavailable,
)
from unified_cache.integrations.engine_store.store import EngineStore

__all__ = [
    "EnginePage",
    "EngineStore",
    "EngineStoreConfig",
    "EngineStoreCounts",
    "HitWatch",
    "Unavailable",
]
