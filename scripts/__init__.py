"""Programs that the Makefile runs, for those who work on the library."""
