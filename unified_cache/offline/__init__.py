"""Stores without an engine: what they hold, whether it is sound, and copies of it from one store to another."""
