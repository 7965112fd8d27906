"""Stands in the place of torch where it is not installed: processes that have this directory in ``PYTHONPATH``."""

raise ModuleNotFoundError("No module named 'torch'", name="torch")
