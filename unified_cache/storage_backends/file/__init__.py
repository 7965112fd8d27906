"""A store in a directory, one file per page: ``file:DIR``. Any number of processes may open it.

store         ``FileStorage``: the protocol's methods; a page is written under another name, then renamed into place.
              ``FileReader``: the store opened to be read alone, which changes nothing
quota         byte cap, which files are evicted for it, and the sweep that counts what others stored
page_reader   where the file of a page lies, its directories kept open, and pages out of their files
"""
