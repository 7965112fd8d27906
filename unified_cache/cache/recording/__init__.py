"""Recordings of what requests ask a cache for: traces in the Mooncake format, in which no prompt can be read.

requests    one request: its pages, what was found of them and where; and those of a cache
recorder    a bounded queue, and the thread that names pages and writes lines into files that are rotated and bounded
"""

__all__ = ()
