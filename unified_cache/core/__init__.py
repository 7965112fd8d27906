"""Values and names that every room uses: no torch, no I/O but files of settings, no threads.

    page       tokens as bytes, whole pages, their keys, namespaces
    window     ``window(end)``, the one idea
    pool       kinds of state, pools, layouts, identities, tiers
    slots      slots of a tier and the page map from Full to SWA
    seal       header and checksum of a stored page
    shards     what each rank holds of a page
    config     what a cache is opened with; ``settings``: files, environment and flags that say it
    errors     every error that is raised, as a tree

Imports nothing of the package.
"""
