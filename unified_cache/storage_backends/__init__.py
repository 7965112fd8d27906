"""Stores of sealed pages behind one protocol.

    protocol   ``StorageBackend``: what every store does
    url        a store opened by its URL
    verified   every page that is read is verified
    manifest   what a store is told about an identity; ``catalog``: what it tells of the identities it holds
    memory_reads   pages that a store has in memory, read by who asks, without waiting
    removals   what a store tells of pages that it lets go
    memory     ``memory:`` and ``keys_only:``
    wrappers   retry, deadline, circuit breaker, metrics: stores around stores

One package per store: ``file``, ``packed``, ``mooncake``, ``remote``. ``directory`` serves the first two,
``common`` serves all.
"""
