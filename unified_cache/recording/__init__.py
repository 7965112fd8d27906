"""Recordings of what requests ask a cache for: traces in the Mooncake format, in which no prompt can be read.

note        one request: its pages, what was found of them and where
requests    requests of a cache, from their look-up to their release
names       pages and namespaces under names of one recording
recorder    a bounded queue, and the thread that names and writes what is in it
file        lines in gzip, in files that are rotated and bounded
"""

__all__ = ()
