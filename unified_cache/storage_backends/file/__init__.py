"""A store in a directory, one file per page: ``file:DIR``. Any number of processes may open it.

A put passes these files in this order, a get ``store`` and ``page_reader``:

    store            ``FileStorage``: the protocol's methods
    quota            byte cap, which files are evicted for it, and the sweep that counts what others stored
    visits           whether there are others
    page_reader      pages out of their files into buffers and rows, and the listing of them
    page_writer      a page into a temporary file, synced if it must be durable, renamed into place
    fan_directories  the directories that files lie in, kept open
    layout           where the file of a page lies, and the listing of those that are there
    reader           ``FileReader``: the store opened to be read alone, which changes nothing
"""
