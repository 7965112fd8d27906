"""Parts that the two stores in a directory share, ``file:`` and ``packed:``.

address      the text after ``file:`` or ``packed:``: directory, free bytes
root         the directory itself: format marker, owner, processes that have it open
layout       names of files and directories that both have, and the identities found
manifests    manifest of each identity, as JSON
stamps       modification times of reads, written many together
foreign      what lies where an object belongs and is none: removed and counted
descriptors  files and directories by descriptor, read and written whole
page_reads   pages out of files: from the system's memory, or many at a time past it
system_memory, direct, read_queue: what is there, what passes by it, and the kernel's queues for that
syncs        a batch made durable: at a time, or in turn where no disk is waited for
disk         the one seam to the operating system
"""
