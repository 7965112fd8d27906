"""A store in a directory, one file per page: ``file:DIR``. Any number of processes may open it."""
