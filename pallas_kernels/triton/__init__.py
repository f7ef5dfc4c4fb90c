"""Triton kernels for NVIDIA GPUs: the same operations and references as the Mosaic kernels, for all but Hopper.

`kernels/` holds the kernels and imports triton; the rest of the package does not, so that it can be imported without.
"""
