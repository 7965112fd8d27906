"""The command line: ``unified-cache``, one module for each command or group of them. Imports every room."""
