"""Stores of sealed pages behind one protocol.

    protocol   ``Store``: what every store does
    url        a store opened by its URL
    verified   verifies every page that is read
    wrappers   retry, deadline, circuit breaker, metrics: stores around stores
    manifest   what a store knows about an identity
    removals   pages that a store has evicted, for those who ask
    memory     ``memory:`` and ``keys_only:``
    offline    backup, prefetch, verification and upkeep of stores without an engine

One package per store: ``file``, ``packed``, ``object``, ``mooncake``, ``remote``. ``directory`` serves the first two,
``common`` serves all. Imports proto and core.
"""
