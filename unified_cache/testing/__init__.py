"""Tools for testing caches and backends: the contract suite, a faulty store, and workers that a seed schedules."""
