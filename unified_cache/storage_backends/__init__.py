"""Stores of sealed pages behind one protocol; the module name is the scheme of its URL."""
