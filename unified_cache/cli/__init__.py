"""The command line: ``unified-cache``."""
