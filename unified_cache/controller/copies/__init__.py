"""Copies of pages: within host memory, and between it and a GPU.

rows      within host memory
gpu       the order of a GPU's copies, copies through pinned buffers, and host memory that a GPU reaches where it lies
kernel    copies straight from and into a pinned slab, by one launch or by the copy engines; needs Triton
engines   the copy engines, which long rows are given to; needs a driver of CUDA 13
"""
