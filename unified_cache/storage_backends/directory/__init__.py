"""Parts that the two stores in a directory share, ``file:`` and ``packed:``."""
