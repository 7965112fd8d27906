"""Parts that the two stores in a directory share, ``file:`` and ``packed:``.

front        address, times of use, and what both do alike
root         the directory itself: marker, owner, processes that have it open, manifests, foreign files
page_reads   pages out of files: from the system's memory, or many at a time past it
read_queue   the kernel's queues for that
disk         the one seam to the operating system; files and directories by descriptor, read and written whole
"""
