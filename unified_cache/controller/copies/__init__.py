"""Copies of pages: within host memory and between it and a GPU (``gpu``), or straight from and into a pinned slab.

``kernel`` does those by one launch or, where the driver is of CUDA 13, by the copy engines; it needs Triton.
"""
