"""A store in the memory of many machines, a Mooncake cluster: ``mooncake://MASTER``.

A page passes these files in this order:

    store      ``MooncakeStorage``: the protocol's methods; manifests of identities, kept as objects
    transfer   batched puts and gets, past nodes that fail
    endpoints  which node holds an object, which nodes fail at the moment, and which one is put on
    client     this process's one client of a cluster, the master's HTTP side, pages as pointers and sizes
    native     the Mooncake library, loaded when it is first needed
    address    where the cluster is
"""
