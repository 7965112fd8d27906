"""For those who test caches and backends: a contract suite, and workers that a seed schedules."""
