"""The store behind the service: pages in the server's memory in front of any ``StorageBackend``.

tiered     both tiers as one store
host_tier  LRU tier in memory; ``leases``: reference counts that forbid eviction for a time
pages      a sealed page in memory, header apart
guarded    the backend opened and guarded, with its metrics
"""
