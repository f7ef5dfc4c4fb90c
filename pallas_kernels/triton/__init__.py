"""Triton kernels for NVIDIA GPUs: the same operations and references as the Mosaic kernels, for all but Hopper.

Only `kernels/` imports triton, so that the rest of the package can be imported without it.
"""
