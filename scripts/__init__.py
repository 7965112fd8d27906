"""Programs that the Makefile runs, for whoever works on the library."""
