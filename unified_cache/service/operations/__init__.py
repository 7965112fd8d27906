"""Operation of a server: metrics, logs, health, its end.

metrics       counters for Prometheus; ``metrics_listener`` serves them, ``live_figures`` shows them on the live page
logs          one line of JSON for each event, and for who asked for what
public_calls  health and reflection, which need no credentials
unix_socket   a Unix socket, held against other servers
process       memory and file descriptors of the process
"""
