"""``UnifiedCache``, all that an engine calls, and what it reports about itself.

    cache       what a request asks for comes first, what an operator asks for last
    stats       figures of a cache at one moment
    explain     why a hit is as long as it is
    recording   requests of an engine, written to a file that can be replayed

Imports controller, storage_backends, tree and core.
"""
