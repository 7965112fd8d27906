"""Tools over stores that need no engine: list, verify, clean up, and copy from one store to another."""
