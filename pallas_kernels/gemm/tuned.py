"""Measured plans; written by `python -m benchmarks.gpu.fp8_gemm` on a GPU, so do not edit by hand.

Empty until that has run: then every product gets the estimate of `plan.py`.
"""

TUNED: dict[tuple, tuple] = {}
"""Key of the product -> fields of a `Plan`."""
