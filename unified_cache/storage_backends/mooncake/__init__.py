"""A store in the memory of many machines, a Mooncake cluster: ``mooncake://MASTER``."""
