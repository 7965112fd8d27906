"""Mooncake's processes: storage nodes, and a cluster of them on one machine for development and tests. Linux only."""
