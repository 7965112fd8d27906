"""A store in a directory, pages side by side in files of equal slots: ``packed:DIR``. One process at a time.

A put passes these files in this order, a get ``store``, ``index`` and ``segment``:

    store       ``PackedStorage``: the protocol's methods; ``PackedReader``: the store opened to be read alone
    index       which page is in which slot, LRU order, the slots of one batch
    segments    the files on the disk: found, made, emptied, given back
    segment     one file of equal slots: a table of entries, then the pages
"""
