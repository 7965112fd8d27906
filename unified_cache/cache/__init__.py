"""``UnifiedCache``, all that an engine calls, and what it reports about itself.

    cache       how it is opened, run and closed
    request     one request from its first question to its end
    calls       the same step by step
    stats       figures of a cache at one moment
    explain     why a hit is as long as it is
    recording   requests of an engine, written to a file that can be replayed

Imports controller, storage_backends, tree and core.
"""
