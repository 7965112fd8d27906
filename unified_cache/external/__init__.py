"""Pages that lie in an engine's own host memory, kept in any store: the room between an engine's adapter and a store.

    store          ``ExternalStore``: never raises on a page, answers why, returns by its deadline
    settings       ``ExternalConfig``, its settings
    counts         what it counts
    landing        memory of our own, where a store that is late may still write
    loan           the engine's rows, for as long as it leaves them
    transfer       pages from landing memory into the engine's rows, and back
    work           what one call asks of a store, part by part
    calls          calls of it by their deadline, and why one did not come to its end
    away           a store that is away: opened later, told later what was registered, left to rest after a failure
    pages          pages of an engine's pools as views, by addresses that are learnt
    tier           several pools over one store: how long a prefix can be restored, and their pages there and back
    weights        digest of a checkpoint's bytes

An engine's rows have no room for our header, and belong to another request as soon as a call has returned. So a page
that may have to be waited for is read, header and payload, into landing memory, verified there, and its payload copied
into the rows; what is in memory is read into the rows by whoever asks. A page to be stored is copied and sealed first.
No module here knows an engine, or needs torch.
"""

from unified_cache.external.counts import ExternalCounts, Unavailable
from unified_cache.external.settings import ExternalConfig
from unified_cache.external.store import ExternalStore
from unified_cache.external.transfer import ExternalPage

__all__ = ["ExternalConfig", "ExternalCounts", "ExternalPage", "ExternalStore", "Unavailable"]
