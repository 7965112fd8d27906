"""Benchmarks of the cache on the machine at hand: ``python -m benchmarks``."""
