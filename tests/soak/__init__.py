"""Tests under minutes of mixed load, of what must hold for long and not only once."""
