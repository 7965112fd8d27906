"""A store in a directory, pages side by side in files of equal slots: ``packed:DIR``. One process at a time."""
