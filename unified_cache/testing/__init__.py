"""For those who test caches and backends: a contract suite, and workers that a seed schedules."""

__all__ = ["seeded_workers", "storage_contract"]
