"""Operation of a server: metrics, logs, traces, reflection, drain.

metrics     counters for Prometheus; ``metrics_listener`` serves them
logs        one line of JSON for each event; ``audit``: who asked for what, and the outcome
reflection  gRPC reflection, bounded
drain       the orderly end of a server
unix_socket a Unix socket, held against other servers
allocator   malloc told to reuse freed memory
"""
