"""Operation of a server: metrics, logs, health, its live page and its process."""
