"""A store in the memory of many machines, a Mooncake cluster: ``mooncake://MASTER``.

A page passes these files in this order:

    store      ``MooncakeStorage``: the protocol's methods
    transfer   batched puts and gets, past nodes that fail
    buffers    pages as pointers and sizes
    endpoints  which node holds an object, and which nodes fail at the moment; ``placement``: which one is put on
    client     this process's one client of a cluster
    native     the Mooncake library, loaded when it is first needed
    manifests  manifests of identities, kept as objects
    admin      the master's HTTP side; ``address`` and ``hosts``: where the cluster is
"""
