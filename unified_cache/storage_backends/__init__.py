"""Stores of sealed pages behind one protocol; the module name is the scheme of its URL."""

__all__ = ["file", "keys_only", "manifest", "memory", "protocol", "url", "verified"]
