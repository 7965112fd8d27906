"""What the cache costs, measured on the machine at hand: ``python -m benchmarks``."""
