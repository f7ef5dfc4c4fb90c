"""The constants of block-scaled FP8, for kernels, checkpoints and the model alike. Nothing here needs jax."""

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
"""The type of FP8 weights and activations: 4 bits of exponent, 3 of mantissa, no infinity."""

E4M3_MAX = 448.0
"""The largest magnitude of `E4M3`."""

BLOCK = 128
"""Consecutive channels that share a scale; a weight's block also spans this many rows."""

AMAX_FLOOR = 1e-4
"""The smallest amax of a scale, so that a block of zeros has a scale above 0 (as in DeepGEMM)."""
